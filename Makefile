# Two commands: `make serve` and `make test`. Each sets up what it needs first.

PYTHON ?= python3
PORT ?= 8000
UI_PORT ?= 8501
PRESET ?= qwen-coder
VENV := .venv
BIN := $(VENV)/bin
SERVE := $(VENV)/.serve-installed
DEV := $(VENV)/.dev-installed
# torch's OpenMP threads must sleep, not spin, while they wait: see README, "Speed".
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 0
# Containers often forbid Python to keep what it compiled; every process would compile all of this anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install serve test e2e soak lint bench gpu-check clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(SERVE)  ## the virtual environment .venv

serve: $(SERVE)  ## gateway on :8000 and replay UI on :8501, models fetched when missing
	$(BIN)/tokentape serve --preset $(PRESET) --port $(PORT) --ui-port $(UI_PORT)

test: $(DEV)  ## the fast tests, no model downloads
	$(BIN)/python -m pytest -n auto --dist loadfile

e2e: $(DEV)  ## the real model pair and a real browser
	$(BIN)/tokentape models pull qwen-coder
	$(BIN)/python -m pytest -m e2e

soak: $(DEV)  ## long fault and load runs
	$(BIN)/python -m pytest -m soak -s

lint: $(DEV)  ## ruff and mypy strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(SERVE)  ## the speed table, as ratios measured in one run
	$(BIN)/tokentape bench

gpu-check: $(DEV)  ## on a CUDA device: equality tests, then the synthetic bench; under four minutes
	$(BIN)/python -m pytest -m gpu
	TOKENTAPE_MODELS_DEVICE=cuda $(BIN)/tokentape bench --synthetic 0.5B:7B --agreement 0.85 \
		--rows 1,8,32 --tokens 64 --repeats 1 --settings "routed exact"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; set PYTHON=..." >&2; exit 2; }
	@echo "== virtual environment $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(SERVE): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "== installing tokentape and what it needs"
	$(BIN)/python -m pip install -c constraints.txt -e .
	@touch $@

$(DEV): $(SERVE)
	@echo "== installing the test tools"
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

clean:  ## remove the virtual environment and caches inside the clone
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
