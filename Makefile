# `make demo` and `make test` need nothing but python3 (3.10 or newer): the virtual environment is made on the way.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made-from-pyproject-and-constraints
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
ARGS ?=
# What `make test` and `make test-slow` leave to the rules that make what these need.
ELSEWHERE := not verl and not vllm and not soak

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-async docs test test-slow test-verl test-vllm soak check wheel bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(STAMP) ## the virtual environment with all extras

# torch goes first, by itself and pinned: asked for by another package, pip would take the newest build, with gigabytes
# of CUDA libraries even where there is no GPU. Without build isolation, building phalanx fetches nothing of its own.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Phalanx needs Python 3.10 or newer, but $(PYTHON) is " + sys.version.split()[0] + ": try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel torch
	$(PIP) --no-build-isolation --editable '.[demo,megatron,verl,data,docs,dev]'
	$(BIN)/python -m compileall -q src
	@touch $@

demo: $(STAMP) ## post-train a small language model with GRPO (ARGS="--steps 100" and so on)
	$(BIN)/python examples/grpo.py $(ARGS)

demo-async: $(STAMP) ## the same with generation and training at the same time (ARGS="--compare" and so on)
	$(BIN)/python examples/grpo_async.py $(ARGS)

docs: $(STAMP) ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

test: $(STAMP) ## the tests, at most 6 minutes on 2 cores (ARGS="-k name" chooses)
	$(BIN)/python -m pytest -m "not slow and $(ELSEWHERE)" $(ARGS)

test-slow: $(STAMP) ## injected faults, many groups, whole examples
	$(BIN)/python -m pytest -m "slow and $(ELSEWHERE)" --ignore tests/docs/test_site.py $(ARGS)

test-verl: $(STAMP) ## verl's own trainers, on Phalanx and on verl's controller (makes an environment of verl, 2 GB)
	$(BIN)/python -m bench.environment verl
	$(BIN)/python -m pytest -m verl $(ARGS) tests/verl

test-vllm: $(STAMP) ## vLLM as a role, on CPUs (makes an environment of vLLM, 4 GB)
	$(BIN)/python -m bench.environment vllm
	PYTHONPATH=src .venv-vllm/bin/python -m pytest -m "vllm and not soak" $(ARGS) tests/engines/vllm

soak: $(STAMP) ## what is in no other rule: many seeds and restarts, verl's asynchronous trainers (ARGS="-k name" chooses)
	$(BIN)/python -m bench.environment verl
	$(BIN)/python -m bench.environment vllm
	$(BIN)/python -m pytest -m "soak and not vllm" -o faulthandler_timeout=4000 -rP $(ARGS)
	PYTHONPATH=src .venv-vllm/bin/python -m pytest -m "vllm and soak" -o faulthandler_timeout=4000 -rP $(ARGS) tests/engines/vllm

check: $(STAMP) ## lint, format, types, sizes, words, imports, and the documentation built strictly
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	MYPYPATH=src $(BIN)/mypy --strict --follow-imports=silent tests/typing
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/check_words.py
	$(BIN)/python -m pytest -q tests/imports tests/docs/test_site.py

wheel: $(STAMP) ## the wheel, into dist/
	rm -rf build dist
	$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

bench: $(STAMP) ## compare with verl and bare Ray (ARGS="--quick" for a short one)
	$(BIN)/python bench/run.py $(ARGS)

clean: ## remove the virtual environment and what tools left
	rm -rf $(VENV) build dist out site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
