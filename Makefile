# Everything a developer or a first-time user runs. `make` alone explains itself.

PYTHON ?= python3
# The PyTorch that is installed where the machine has none.
TORCH ?= torch==2.13.0
EXTRAS ?= plot,dev,docs
PYTEST_ARGS ?=
# ON: the core tests fail where libfabric or its headers are missing, instead of leaving tests out.
REQUIRE_LIBFABRIC ?= OFF
# ON: a warning about the extension's sources ends the build, as one about the core's always does.
WERROR ?= OFF
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

VENV := .venv
BIN := $(VENV)/bin
CORE := build/core
# Two makes in one checkout would write the same environment; the second one waits. macOS has no
# flock, and there two makes are the user's own care.
LOCK := $(if $(shell command -v flock),flock .make.lock,)
LOCKED_MAKE = @$(LOCK) $(MAKE) --no-print-directory --silent

# Folders are listed too: their time changes when a file is added or removed.
NATIVE := $(shell find csrc fanfold/kernels -not -name '*.pyc' -not -name __pycache__ 2>/dev/null)
CORE_TESTS := $(shell find tests/core 2>/dev/null)
CXX_FILES = $(shell find csrc tests/core tests/kernels tests/emulation fanfold/kernels -name '*.cpp' -o -name '*.hpp' \
	-o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
PY_DIRS := $(wildcard fanfold tools tests benchmarks packages examples)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv build demo test test-core test-python test-hosts test-long test-kernels \
	test-frameworks test-frameworks-gpu test-gpu nccl-plugin lint format sanitize sanitizer-builds docs wheel clean

help:
	@echo 'Fanfold: set-up happens by itself; start with make demo.'
	@echo
	@echo '  make demo       build, then train a small MoE model over several ranks'
	@echo '  make test       build, then the C++ and the Python tests (the default set)'
	@echo '  make test-long  the same, with the tests marked long'
	@echo '  make test-hosts the tests of ranks again, on HOSTS=$(HOSTS) hosts over NETWORK=$(NETWORK)'
	@echo '  make test-kernels   compiles the kernels of many sizes, without a GPU'
	@echo '  make test-frameworks  Megatron-LM'"'"'s dispatchers over deep_ep (installs megatron-core)'
	@echo '  make test-frameworks-gpu  the same on GPUs'
	@echo '  make test-gpu   the tests marked gpu (PYTEST_ARGS="-m gpu": the long ones, too)'
	@echo '  make lint       ruff, mypy, clang-format, clang-tidy, tools/tidy.py'
	@echo '  make format     let ruff and clang-format rewrite the sources'
	@echo '  make sanitize   the C++ tests under ASAN with UBSAN, then under TSAN'
	@echo '  make docs       the documentation site into build/docs; warnings are errors'
	@echo '  make wheel      wheel and sdist into dist/'
	@echo '  make build      the environment $(VENV) with an editable install'
	@echo '  make venv       the environment and PyTorch only'
	@echo '  make clean      remove builds and caches ($(VENV) stays)'
	@echo
	@echo 'Variables: PYTHON=$(PYTHON)  TORCH=$(TORCH)  EXTRAS=$(EXTRAS)  PYTEST_ARGS=$(PYTEST_ARGS)'

# ---- environment and build ----------------------------------------------------------------------

venv:
	$(LOCKED_MAKE) $(VENV)/.stamp-venv

build:
	$(LOCKED_MAKE) $(VENV)/.stamp-build

# A virtual environment on top of another one sees only the base Python's packages,
# so only a PyTorch outside of environments can be shared.
$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo 'Fanfold needs Python 3.10 or newer; $(PYTHON) is older or missing.'; \
	  echo 'Name another one: make PYTHON=python3.12 ...'; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo '$(PYTHON) cannot create virtual environments: its venv or ensurepip is missing.'; \
	  echo 'Debian, Ubuntu: apt install python3-venv    Fedora: dnf install python3'; exit 1; }
	@if $(PYTHON) -c 'import sys, torch; sys.exit(sys.prefix != sys.base_prefix)' 2>/dev/null; then \
	  echo 'Using the PyTorch of $(PYTHON).'; \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	  echo 'Installing $(TORCH) into $(VENV); TORCH=... names another.'; \
	  $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install -qq '$(TORCH)'; \
	fi
	@touch $@

# What the build itself needs comes first, because the editable install runs without isolation:
# only so can the second build reuse the first.
$(VENV)/.stamp-tools: $(VENV)/.stamp-venv
	@command -v $${CXX:-c++} >/dev/null || { \
	  echo 'No C++ compiler. Debian, Ubuntu: apt install g++    Fedora: dnf install gcc-c++'; \
	  exit 1; }
	@$(BIN)/python -c 'import pathlib, sys, sysconfig; \
	  sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' || { \
	  echo 'The header Python.h is missing.'; \
	  echo 'Debian, Ubuntu: apt install python3-dev    Fedora: dnf install python3-devel'; exit 1; }
	@$(BIN)/python -m pip install -qq 'scikit-build-core>=0.11' 'nanobind>=3,<4' \
	  'cmake>=3.26' 'ninja>=1.11'
	@touch $@

$(VENV)/.stamp-build: $(VENV)/.stamp-tools pyproject.toml CMakeLists.txt $(NATIVE)
	@echo 'Building Fanfold.'
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install -qq --no-build-isolation \
	  --config-settings cmake.define.FANFOLD_WERROR=$(WERROR) --editable '.[$(EXTRAS)]'
	@touch $@

wheel: build
	@rm -rf dist && mkdir dist
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m build --quiet --no-isolation \
	  --config-setting cmake.define.FANFOLD_WERROR=$(WERROR) --outdir dist .
	@ls dist

docs: build
	@$(BIN)/python -m sphinx -q -E -W --keep-going -j $(JOBS) docs build/docs
	@echo 'build/docs/index.html'

# ---- running and testing ------------------------------------------------------------------------

# Threads of PyTorch's operators sleep between operators. By default they spin, which takes the cores
# from the ranks of the same test and from the other test processes.
export OMP_WAIT_POLICY ?= passive

demo: build
	$(BIN)/fanfold demo

test: test-core test-python

# cmake and ninja come from the environment, so that a machine needs only Python and a compiler.
# $(1) is the build folder, $(2) further options.
define core_build
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B $(1) -G Ninja --log-level=WARNING \
	  -DFANFOLD_CORE_TESTS=ON -DFANFOLD_WERROR=ON \
	  -DFANFOLD_REQUIRE_LIBFABRIC=$(REQUIRE_LIBFABRIC) $(2) >/dev/null
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build $(1) -j $(JOBS) -- --quiet
endef

# Many tests wait more than they work, so more processes share them than there are cores.
# Each part needs tests, so there are not too many.
CORE_PARTS = $$((3 * $(JOBS) < 24 ? 3 * $(JOBS) : 24))
run_core = seq $(CORE_PARTS) | xargs -P $(CORE_PARTS) -I{} $(1)/core_tests --part={}/$(CORE_PARTS)

$(CORE)/.stamp $(CORE)-asan/.stamp $(CORE)-tsan/.stamp: CMakeLists.txt $(NATIVE) $(CORE_TESTS)

$(CORE)/.stamp:
	$(call core_build,$(CORE),)
	@touch $@

$(CORE)-asan/.stamp:
	$(call core_build,$(CORE)-asan,-DFANFOLD_SANITIZE=address$(comma)undefined)
	@touch $@

$(CORE)-tsan/.stamp:
	$(call core_build,$(CORE)-tsan,-DFANFOLD_SANITIZE=thread)
	@touch $@

comma := ,

test-core: build
	$(LOCKED_MAKE) $(CORE)/.stamp
	$(call run_core,$(CORE))

# Tests wait for a third of their time, so there are half as many processes again as cores. Each
# starts ranks of its own; more than a few would only compete.
SPREAD := -n $(shell echo $$(((3 * $(JOBS) + 1) / 2))) --maxprocesses 8 --dist worksteal

test-python: build
	$(BIN)/python -m pytest $(SPREAD) --durations 10 $(PYTEST_ARGS)

# The tests whose ranks are on one host, with this machine acting as several.
HOSTS ?= 2
NETWORK ?= libfabric:tcp

test-hosts: build
	FANFOLD_HOSTS=$(HOSTS) FANFOLD_NETWORK=$(NETWORK) $(BIN)/python -m pytest $(SPREAD) \
	  -m 'not long and not gpu and not one_host' tests/conformance tests/distributed $(PYTEST_ARGS)

test-long: test-core
	$(BIN)/python -m pytest $(SPREAD) -m 'not gpu and not frameworks' --hypothesis-profile=long --timeout=3600 $(PYTEST_ARGS)

test-kernels: build
	$(BIN)/python -m pytest $(SPREAD) -m long -k 'not more_for_hopper' \
	  tests/unit/test_kernels_compile.py tests/unit/test_high_throughput_compile.py $(PYTEST_ARGS)

# Megatron-LM's own dispatchers over deep_ep, in a folder of their own: the environment stays without.
MEGATRON := 0.16.1
FRAMEWORKS := build/frameworks

$(FRAMEWORKS)/.stamp-$(MEGATRON): packages/deep_ep/pyproject.toml $(shell find packages/deep_ep/src -name '*.py')
	rm -rf $(FRAMEWORKS)
	$(BIN)/python -m pip install -q --no-deps --target $(FRAMEWORKS) megatron-core==$(MEGATRON)
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation --target $(FRAMEWORKS) packages/deep_ep
	@touch $@

# The device headers of NCCL, for kernels that include them: PyTorch's version, the first that offers
# GIN through an RMA plugin, and the newest.
NCCL := 2.28.9 2.30.7 2.32.3

build/nccl_headers/.stamp-%: tools/nccl_headers.py
	$(BIN)/python tools/nccl_headers.py $* build/nccl_headers
	@touch $@

test-frameworks: build
	$(LOCKED_MAKE) $(FRAMEWORKS)/.stamp-$(MEGATRON) $(NCCL:%=build/nccl_headers/.stamp-%)
	PYTHONPATH=$(FRAMEWORKS) $(BIN)/python -m pytest -m 'frameworks and not gpu' tests/frameworks \
	  $(PYTEST_ARGS)

NEEDS_GPU = @$(BIN)/python -c 'import sys, torch; torch.cuda.device_count() or \
	sys.exit(f"PyTorch {torch.__version__} sees no GPU, so nothing would be tested")'

# NCCL's GIN needs a NIC, or this.
nccl-plugin:
	cmake -S . -B build/nccl_plugin -DFANFOLD_NCCL_PLUGIN=ON
	cmake --build build/nccl_plugin --target fanfold_nccl_plugin

test-gpu: build nccl-plugin
	$(NEEDS_GPU)
	$(BIN)/python -m pytest -m 'gpu and not long and not frameworks' $(PYTEST_ARGS)

test-frameworks-gpu: build
	$(NEEDS_GPU)
	$(LOCKED_MAKE) $(FRAMEWORKS)/.stamp-$(MEGATRON)
	PYTHONPATH=$(FRAMEWORKS) $(BIN)/python -m pytest -m 'frameworks and gpu' tests/frameworks \
	  $(PYTEST_ARGS)

# Without the lock, so that tests may run meanwhile.
sanitizer-builds: build
	@$(MAKE) --no-print-directory --silent $(CORE)-asan/.stamp $(CORE)-tsan/.stamp

sanitize: build
	$(LOCKED_MAKE) $(CORE)-asan/.stamp
	export UBSAN_OPTIONS=print_stacktrace=1 \
	  LSAN_OPTIONS=suppressions=tests/core/leaks.supp:print_suppressions=0; \
	  $(call run_core,$(CORE)-asan)
	$(LOCKED_MAKE) $(CORE)-tsan/.stamp
	$(call run_core,$(CORE)-tsan)

# ---- form ---------------------------------------------------------------------------------------

# clang-tidy reads how each file is compiled: the core's files from the core tests' build, the
# bindings from the extension's, whose folder is named after the wheel's tag.
CLANG_TIDY = $(BIN)/run-clang-tidy.py -quiet -hide-progress -j $(JOBS) \
	-clang-tidy-binary $(BIN)/clang-tidy
EXTENSION = $(shell ls -dt build/cp3* | head -n 1)

lint: build
	$(BIN)/python tools/tidy.py
	$(BIN)/ruff check $(PY_DIRS)
	$(BIN)/ruff format --check $(PY_DIRS)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(LOCKED_MAKE) $(CORE)/.stamp
	$(CLANG_TIDY) -p $(CORE) '/(csrc|tests/core)/'
	$(CLANG_TIDY) -p $(EXTENSION) '/csrc/bindings/'

format: build
	$(BIN)/ruff check --fix-only --quiet $(PY_DIRS)
	$(BIN)/ruff format $(PY_DIRS)
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(VENV)/.stamp-build fanfold/_core.pyi
	find $(PY_DIRS) -name __pycache__ -prune -exec rm -rf {} +
