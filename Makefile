# One command per job; `make` alone lists them. Everything runs in .venv of this folder, which is made on first use.
#   make test PYTHON=python3.12        another interpreter
#   make test TORCH=torch==2.11.0      another torch (ci/torch_args.py says from where)
#   make demo ARGS="--data ~/books"    arguments of the demo, or of pytest
#   make kernels ARGS="forward:bf16:128:0"   one CUDA kernel (docs/contributing/build_kernels.md)

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
SOURCE_KINDS := h cpp cu cuh
CXX_SOURCES := $(foreach kind,$(SOURCE_KINDS),$(wildcard csrc/*/*.$(kind) csrc/*/*/*.$(kind)))
BUILD_INPUTS := pyproject.toml setup.py csrc/attention/variants.txt csrc/bindings/exports.map \
    $(wildcard ci/backend/*.py ci/kernel_build/*.py) $(CXX_SOURCES)
LAID_OUT := $(foreach kind,$(SOURCE_KINDS),'csrc/*.$(kind)' 'tests/*.$(kind)')
CLEAN_DIR := build/wheel-check

# Torch threads that wait without spinning: on a busy machine small operations are else up to 30 times slower.
export OMP_WAIT_POLICY ?= passive

.PHONY: help demo test kernels lint format types cpp-test rules docs figures support wheel wheel-check matrix clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

# torch first and apart, so that the machine's kind of torch is chosen before pip resolves the package.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q "pip>=23"
	$(PY) -m pip install --progress-bar off $$($(PY) ci/torch_args.py "$(TORCH)")
	@touch $@

# Two sets: what the demo needs, and what development needs. Each install compiles the planner, so there are no more.
$(VENV)/.installed-%: $(VENV)/.torch $(BUILD_INPUTS)
	$(PY) -m pip install -q -e ".[$*]"
	@touch $@

demo: $(VENV)/.installed-demo ## train a small model on real text over 4 ranks, check it, draw pictures
	$(PY) examples/05_train_long_context.py $(ARGS)

test: $(VENV)/.installed-dev ## the whole CPU test suite
	$(PY) -m pytest $(ARGS)

kernels: ## compile the CUDA kernels, or those of ARGS, and print their registers and spills (nvcc, no venv)
	$(PYTHON) ci/compile_kernels.py $(ARGS)

rules: $(VENV)/.installed-dev ## import directions, file budgets, documentation
	$(PY) -m pytest tests/rules -q

lint: $(VENV)/.installed-dev ## ruff and clang-format, changes nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files $(LAID_OUT))

format: $(VENV)/.installed-dev ## let ruff and clang-format rewrite the files
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $$(git ls-files $(LAID_OUT))

types: $(VENV)/.installed-dev ## mypy, strict
	$(PY) -m mypy

cpp-test: ## C++ tests of the solver (cmake and g++)
	cmake -S . -B build/cpp -DCMAKE_BUILD_TYPE=Release
	cmake --build build/cpp -j 2
	ctest --test-dir build/cpp --output-on-failure

docs: $(VENV)/.installed-dev ## build the documentation into site/
	$(PY) -m mkdocs build --strict

figures: $(VENV)/.installed-dev ## redraw the pictures of docs/
	$(PY) docs/make_figures.py

support: $(VENV)/.installed-dev ## rewrite docs/support.md by running every cell
	$(PY) docs/make_support.py

wheel: $(VENV)/.installed-dev ## a wheel into dist/
	$(PY) -m pip wheel -q --no-deps -w dist .

# Nothing of this folder may be needed: the wheel goes to a venv of its own and runs from there.
wheel-check: $(VENV)/.torch ## wheel, clean venv, import, kernels in it, self-test from another folder
	rm -rf $(CLEAN_DIR) && mkdir -p $(CLEAN_DIR)/run
	$(PY) -m pip wheel -q --no-deps -w $(CLEAN_DIR)/dist .
	$(PYTHON) -m venv $(CLEAN_DIR)/venv
	$(CLEAN_DIR)/venv/bin/python -m pip install -q $$($(PY) ci/torch_args.py "$(TORCH)")
	$(CLEAN_DIR)/venv/bin/python -m pip install -q $(CLEAN_DIR)/dist/*.whl
	cd $(CLEAN_DIR)/run && ../venv/bin/python ../../../ci/check_wheel.py
	cd $(CLEAN_DIR)/run && ../venv/bin/python -m magi_attention.doctor
	cd $(CLEAN_DIR)/run && ../venv/bin/python -m magi_attention.selftest --ranks 2

# Wheels of the variants in MAGI_BUILD_VARIANTS (all when not set), installed as users do; results stay in build/.
matrix: $(VENV)/.installed-dev ## published wheels and the conda package, and the cells of ci/matrix.yaml that every change runs
	PYTHON=$(abspath $(PY)) bash ci/wheels.sh --no-container --torch 2.10 2.11 --out build/matrix/wheels \
	    $(if $(MAGI_BUILD_VARIANTS),--variants '$(MAGI_BUILD_VARIANTS)')
	$(PY) ci/run_matrix.py --subset --drop-bases --wheels build/matrix/wheels --results build/matrix/results

clean: ## remove what the commands above made
	rm -rf $(VENV) build dist site demo_out *.egg-info magi_attention/_solver*.so magi_attention/_ffa*.so magi_attention/_cu* magi_attention/_version.py magi_attention/_build.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
