# Two commands for a fresh machine: `make demo` and `make test`. Both set up .venv first, once. `make test-all` adds the slow half of the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The Triton of the oldest supported torch, beside the newest one in .venv; tests/test_aot.py compiles with both.
OLDEST_TRITON := $(VENV)/triton-3.6

.PHONY: demo test test-all bench clean

$(STAMP): setup.py pyproject.toml constraints.txt $(wildcard csrc/*.cpp csrc/*.h csrc/cpu/* csrc/cuda/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch numpy setuptools wheel ninja pybind11
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[test]'
	touch $@

demo: $(STAMP)
	$(BIN)/eagle demo

# One OpenMP thread, since the tensors of the tests are tiny; those about threads set their own number.
test: $(STAMP) $(OLDEST_TRITON)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow"

test-all: $(STAMP) $(OLDEST_TRITON)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

$(OLDEST_TRITON)/.installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLDEST_TRITON) --upgrade triton==3.6.0
	touch $@

bench: $(STAMP)
	$(BIN)/python bench/bench_linear.py
	$(BIN)/eagle bench --suite mt_bench --limit 8 --max-new-tokens 128

clean:
	rm -rf build *.egg-info eagle_kernels/*.so $(VENV)
