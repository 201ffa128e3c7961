# Everything installs into .venv with pip under constraints.txt; only Python 3.11+ and pip are needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help setup demo test test-all lint format bench docs clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

# torch goes first and alone, by its exact version, so that nothing else chooses a build for it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, got {sys.version.split()[0]}"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	touch $@

setup: $(STAMP)  ## create .venv and install Thalweg with its development tools

demo: setup  ## train, measure and use a pronunciation model on embedded data
	$(BIN)/thalweg recipe run demo --out runs/demo --fresh

# A process for each core; tests of one file stay together, because they share what is slow to make, and files keep the
# order of tests/conftest.py.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

test: setup  ## the test suite
	$(BIN)/python -m pytest $(PARALLEL)

test-all: setup  ## the test suite with the slow checks
	$(BIN)/python -m pytest $(PARALLEL) -m 'slow or not slow'

lint: setup  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup  ## let ruff lay the code out
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## benchmarks beside the peers that are installed
	$(BIN)/python -m benchmarks training
	$(BIN)/python -m benchmarks chain

docs: setup  ## build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## remove what the other targets made
	rm -rf $(VENV) site build dist runs .pytest_cache .ruff_cache
