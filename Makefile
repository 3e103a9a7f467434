# `make run` on a fresh machine is all it takes; every target installs what it needs first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# cpu or cuda: which torch. Where the package index carries only one build for a platform, that one comes;
# set TORCH_INDEX_URL to PyTorch's own CPU wheel index to get the small build on Linux x86-64.
TORCH  ?= cpu
ARGS   ?=

.DEFAULT_GOAL := help

# Two installations into one environment at a time break it.
.NOTPARALLEL:

.PHONY: help
help:  ## Show this help
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-17s %s\n", $$1, $$2}'

.PHONY: install
install: $(VENV)/.demo-$(TORCH) $(VENV)/.kernels  ## Make .venv and install Phasemesh with the demo model and grpcurl (TORCH=cpu|cuda)

$(VENV)/.demo-$(TORCH) $(VENV)/.dev-$(TORCH): $(VENV)/.%-$(TORCH): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python deploy/install.py --torch $(TORCH) --extra $*
	touch $@

# The compiled search kernels: built where a compiler is, done without elsewhere.
KERNELS := workers/kernels
$(VENV)/.kernels: $(wildcard $(addprefix $(KERNELS)/,CMakeLists.txt pyproject.toml core/*.[ch]pp python/*.cpp \
		src/phasemesh_kernels/*.py src/phasemesh_kernels/*.pyi))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python deploy/install.py --kernels --stamp $@

.PHONY: kernels
kernels:  ## Build and install the search kernels again
	rm -f $(VENV)/.kernels
	$(MAKE) --no-print-directory $(VENV)/.kernels

.PHONY: run
run: install  ## Start the mesh with a real model; Ctrl-C drains and stops
	$(BIN)/phasemesh up $(ARGS)

.PHONY: demo
demo: install  ## Embed, rerank, index and search real passages against a running mesh
	$(BIN)/phasemesh demo $(ARGS)

.PHONY: dev
dev: $(VENV)/.dev-$(TORCH) $(VENV)/.kernels  ## Install what developing needs

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

# The core and its C++ tests, without Python; warnings are errors.
KERNELS_CORE = $(BIN)/cmake -S $(KERNELS) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	-DPHASEMESH_KERNELS_PYTHON=OFF -DPHASEMESH_KERNELS_TESTS=ON -DCMAKE_COMPILE_WARNING_AS_ERROR=ON
CTEST = $(BIN)/ctest --output-on-failure --no-tests=error --test-dir

.PHONY: kernels-sanitize
kernels-sanitize: dev  ## The kernels' C++ tests with the address and undefined-behaviour sanitizers
	$(KERNELS_CORE) -B build/kernels-sanitize -DPHASEMESH_KERNELS_SANITIZE=address,undefined
	$(BIN)/cmake --build build/kernels-sanitize
	$(CTEST) build/kernels-sanitize $(ARGS)

.PHONY: kernels-aarch64
kernels-aarch64: dev  ## The kernels' C++ tests for 64-bit ARM, cross-compiled and emulated
	@command -v aarch64-linux-gnu-g++ >/dev/null && \
	{ command -v qemu-aarch64 || command -v qemu-aarch64-static; } >/dev/null || \
	{ echo "needs a cross compiler and an emulator: apt install g++-aarch64-linux-gnu qemu-user"; exit 1; }
	$(KERNELS_CORE) -B build/kernels-aarch64 \
		-DCMAKE_TOOLCHAIN_FILE=$(abspath $(KERNELS)/cmake/aarch64-linux-gnu.cmake)
	$(BIN)/cmake --build build/kernels-aarch64
	$(CTEST) build/kernels-aarch64 $(ARGS)

.PHONY: bench
bench: dev  ## The service against its own engine, side by side
	$(BIN)/python -m tests.bench.skeleton --json

.PHONY: clean
clean:  ## Remove the environment and everything that was built
	rm -rf $(VENV) build dist $(KERNELS)/build $(KERNELS)/dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
