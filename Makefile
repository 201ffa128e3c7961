# Everything installs into .venv with pip under constraints.txt; only Python 3.11+ and pip are needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
KERNELS := $(VENV)/.kernels

.PHONY: help setup browser demo test test-all lint format bench docs clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

# torch goes first and alone, by its exact version, so that nothing else chooses a build for it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, got {sys.version.split()[0]}"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--config-settings=kernels=later -e '.[dev,docs]'
	touch $@

# Compiled when a source has changed, by the compiler that is there, else by one from PyPI; without any, plain PyTorch
# answers.
$(KERNELS): $(STAMP) CMakeLists.txt tools/build_backend.py $(wildcard src/thalweg/kernels/cpu/csrc/*)
	$(BIN)/python tools/build_backend.py
	touch $@

setup: $(KERNELS)  ## create .venv and install Thalweg with its development tools

# The tests of the page want Debian's Chromium. Where apt-get may not install it they are skipped, and say so.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  command -v apt-get >/dev/null || exit 0; \
	  if [ "$$(id -u)" = 0 ]; then as=; elif sudo -n true 2>/dev/null; then as='sudo -n'; else exit 0; fi; \
	  $$as apt-get -qq update >/dev/null && $$as env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y chromium >/dev/null \
	  || echo 'chromium could not be installed: the tests of the page are skipped'; }

demo: setup  ## train, measure and use a pronunciation model on embedded data
	$(BIN)/thalweg recipe run demo --out runs/demo --fresh

# A process for each core; tests of one file stay together, because they share what is slow to make, and files keep the
# order of tests/conftest.py.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

# Tests start hundreds of processes: what Python compiled for one is there for the next, whatever the shell asks for.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: setup browser  ## the test suite
	$(BIN)/python -m pytest $(PARALLEL)

test-all: setup browser  ## the test suite with the slow checks
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
