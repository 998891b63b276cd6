# docker build -t medconv .                                                               CPU
# docker build -t medconv --build-arg TORCH=https://download.pytorch.org/whl/cu130 .      CUDA
# docker run --gpus all --shm-size 8g --user "$(id -u):$(id -g)" -v "$PWD:/work" medconv train data.root=DATASET
FROM python:3.12-slim
ARG TORCH=https://download.pytorch.org/whl/cpu
# Triton and torch.compile build their launchers with it
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY medconv medconv
COPY conf conf
RUN pip install --no-cache-dir --index-url "$TORCH" "$(grep ^torch== constraints.txt)" \
    && pip install --no-cache-dir -c constraints.txt '.[all]' && rm -rf /src
# Not root, whoever runs it; caches of compilers and libraries need a home that can be written.
RUN useradd --create-home medconv && chmod 777 /home/medconv
ENV HOME=/home/medconv
USER medconv
WORKDIR /work
ENTRYPOINT ["medconv"]
