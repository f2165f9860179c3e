# `make demo` and `make test` do everything on a machine that has Python (>= 3.10) and make.
PYTHON ?= python3
OLDEST_PYTHON ?= python3.10
NEWEST_PYTHON ?= $(PYTHON)
VENV := .venv
BIN := $(VENV)/bin
FAST_TESTS := -m pytest -n 2 --dist loadfile -m "not slow"

.PHONY: demo docs test test-oldest test-newest test-gpu lint clean

demo: $(VENV)/.installed
	$(BIN)/deltanet-hf demo demo

# The site of docs/, into site/.
docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python $(FAST_TESTS)

# The same tests with the oldest versions that pyproject.toml allows, and with the newest that there are.
test-oldest: .venv-oldest/.installed
	OMP_NUM_THREADS=1 .venv-oldest/bin/python $(FAST_TESTS)

test-newest:
	$(NEWEST_PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade pip
	.venv-newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[dev]'
	OMP_NUM_THREADS=1 .venv-newest/bin/python $(FAST_TESTS)

# The kernels and models on a CUDA device (without one, `make test` runs the kernels in Triton's interpreter). How they
# ended is recorded in tests/gpu_run.json.
COMMIT ?= $(shell git describe --always --dirty --exclude '*')
test-gpu: $(VENV)/.installed
	$(BIN)/python tools/gpu_tests.py --commit $(COMMIT)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
# The exact torch first, on its own: a plain requirement may draw another build and gigabytes with it.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	$(OLDEST_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest demo/out site .mypy_cache .pytest_cache .ruff_cache
