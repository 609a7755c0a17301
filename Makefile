# Two commands stand alone on a fresh machine with Python 3.11+: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# torch is pinned to a build that runs on a CPU; pyproject.toml allows torch>=2.11.
TORCH ?= torch==2.13.0

.PHONY: venv demo test test-all check bench bench-casts exhaustive clean

venv: $(STAMP)

$(STAMP): pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(STAMP)

demo: venv
	$(BIN)/python -m scaledtensor demo

test: venv
	$(BIN)/python -m pytest -n auto

test-all: venv
	$(BIN)/python -m pytest -n auto -m ""

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv
	$(BIN)/python -m benchmarks.step

bench-casts: venv
	$(BIN)/python -m benchmarks.casts

exhaustive: venv
	$(BIN)/python -m benchmarks.exhaustive

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
