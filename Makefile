# `make run` on a fresh machine is all it takes; every target installs what it needs first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# cpu or cuda: which torch. Where the package index carries only one build for a platform, that one comes;
# set TORCH_INDEX_URL to PyTorch's own CPU wheel index to get the small build on Linux x86-64.
TORCH  ?= cpu
ARGS   ?=

.DEFAULT_GOAL := help

.PHONY: help
help:  ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-13s %s\n", $$1, $$2}'

.PHONY: install
install: $(VENV)/.demo-$(TORCH)  ## Make .venv and install Phasemesh with the demo model and grpcurl (TORCH=cpu|cuda)

$(VENV)/.demo-$(TORCH) $(VENV)/.dev-$(TORCH): $(VENV)/.%-$(TORCH): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python deploy/install.py --torch $(TORCH) --extra $*
	touch $@

.PHONY: run
run: install  ## Start the mesh with a real model; Ctrl-C drains and stops
	$(BIN)/phasemesh up $(ARGS)

.PHONY: demo
demo: install  ## Embed, rerank, index and search real passages against a running mesh
	$(BIN)/phasemesh demo $(ARGS)

.PHONY: dev
dev: $(VENV)/.dev-$(TORCH)  ## Install what developing needs

.PHONY: protos
protos: dev  ## Generate the Python code of the protos
	$(BIN)/python protos/generate.py

.PHONY: protos-check
protos-check: dev  ## Lint the protos and fail if their generated code is out of date
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code .
	$(BIN)/python protos/generate.py --check

.PHONY: format
format: dev  ## Format code and protos
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .
	cd protos && ../$(BIN)/buf format -w .

.PHONY: lint
lint: dev protos-check  ## Style, import contracts, protos
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/lint-imports

.PHONY: types
types: dev  ## mypy --strict
	$(BIN)/mypy

.PHONY: test
test: dev  ## All tests that need no GPU; under 15 minutes on 2 cores
	$(BIN)/python -m pytest $(ARGS)

.PHONY: bench
bench: dev  ## The service against its own engine, side by side
	$(BIN)/python -m tests.bench.skeleton --json

.PHONY: clean
clean:  ## Remove the environment and everything that was built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
