# docker build -t medconv .                                                               CPU
# docker build -t medconv --build-arg TORCH=https://download.pytorch.org/whl/cu128 .      CUDA
# docker run --gpus all --shm-size 8g -v "$PWD:/work" medconv train data.root=DATASET
FROM python:3.12-slim
ARG TORCH=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY medconv medconv
COPY hydra_plugins hydra_plugins
COPY conf conf
RUN pip install --no-cache-dir --index-url "$TORCH" "$(grep ^torch== constraints.txt)" \
    && pip install --no-cache-dir -c constraints.txt '.[all]' && rm -rf /src
WORKDIR /work
ENTRYPOINT ["medconv"]
