# The commands that people and CI share. `make help` lists them.
#
# PYTHON is the interpreter that .venv is made from. Given by hand (make gpu PYTHON=python3), gpu and bench use it
# directly, install nothing, and find the package in src: for machines that have a torch of their own, and no network.

PYTHON ?= python3
ARGS ?=

VENV := .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest --timeout=900
# A process a CPU, each with one thread. Bytecode is written: tests start processes, and each would compile all of it.
IN_ONE_THREAD := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
IN_PARALLEL := -n logical --maxprocesses 8 --dist worksteal
# Seconds of each test, kept after the run.
DURATIONS := --junitxml=build/tests.xml

ifneq ($(filter command environment,$(firstword $(origin PYTHON))),)
  DIRECT := PYTHONPATH=src $(PYTHON)
  DIRECT_NEEDS :=
else
  DIRECT := $(BIN)/python
  DIRECT_NEEDS := $(READY)
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all check format gpu bench docs clean

help:  ## say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(READY)  ## make .venv with the package, its tests' and its developers' needs

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[report,trainers,quantized,browser,docs,test,dev]'
	touch $@

demo: $(READY)  ## train a small GPT each way and compare time, memory and gradients (ARGS="--layers 4")
	$(BIN)/spillway demo $(ARGS)

test: $(READY)  ## the tests that every machine can run
	$(IN_ONE_THREAD) $(PYTEST) $(IN_PARALLEL) $(DURATIONS) $(ARGS)

test-all: $(READY)  ## these and the long matrices
	$(IN_ONE_THREAD) $(PYTEST) $(IN_PARALLEL) -m "not gpu" --timeout=7200 $(DURATIONS) $(ARGS)

check: $(READY)  ## lint, format, types, import order
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(PYTEST) -q tests/test_layers.py

format: $(READY)  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

gpu: $(DIRECT_NEEDS)  ## the tests that need an accelerator (PYTHON=python3 for an environment of your own)
	$(DIRECT) -m pytest -m gpu tests/gpu tests/hazards $(ARGS)

bench: $(DIRECT_NEEDS)  ## the benchmarks
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(DIRECT) $$script $(ARGS) || exit 1; done

# Not --quiet, which hides warnings from --strict, too.
docs: $(READY)  ## the documentation, into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/docs/index.html"

clean:  ## remove what was made here, .venv too
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
