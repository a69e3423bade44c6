# Two commands for a fresh machine: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test bench clean

$(STAMP): setup.py pyproject.toml constraints.txt $(wildcard csrc/*.cpp csrc/*.h csrc/cpu/* csrc/cuda/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch numpy setuptools wheel ninja pybind11
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[test]'
	touch $@

demo: $(STAMP)
	$(BIN)/eagle demo

# One OpenMP thread, since the tensors of the tests are tiny; those about threads set their own number.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

bench: $(STAMP)
	$(BIN)/python bench/bench_linear.py
	$(BIN)/eagle bench --suite mt_bench --limit 8 --max-new-tokens 128

clean:
	rm -rf build *.egg-info eagle_kernels/*.so $(VENV)
