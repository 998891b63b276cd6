# The two commands of a fresh machine: `make train` and `make test`. Both make the virtual environment if it is missing.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# dev,triton also tests the kernels for GPUs, by Triton's interpreter
EXTRAS ?= dev
# processes that share the tests; each of them starts trainings of its own
JOBS ?= 2

.PHONY: train test test-core lint types docs check clean

train: $(VENV)/.installed
	$(VENV)/bin/python train.py $(ARGS)

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# what the core promises, without features, whole runs, benchmarks, the site and kernels that are for GPUs alone
test-core: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not slow and not run' tests \
		--ignore=tests/features --ignore=tests/integration --ignore=tests/benchmarks --ignore=tests/gpu_checks \
		--ignore=tests/training/distributed \
		--ignore=tests/test_benchmark.py --ignore=tests/test_docs_site.py --ignore=tests/test_golden.py \
		--ignore=tests/test_release.py --ignore-glob='*/test_triton_*' $(ARGS)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed
	$(VENV)/bin/mypy

# the documentation site, in build/site; without the development tools
docs:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(VENV)/bin/python docs/site.py
	$(VENV)/bin/zensical build --strict

check: lint types test

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "needs Python 3.11 or later; name one by PYTHON=..., this is `$(PYTHON) --version`" >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) build dist
