# `make train`, `make train-text` and `make test` are all a newcomer needs: they make .venv first where it is missing or out of date.
# On a machine with its own PyTorch, use that one instead: make gpu-check PYTHON=python3

VENV   ?= .venv
PYTHON ?= $(VENV)/bin/python

# make train
NPROC     ?= 2
ALGORITHM ?= allreduce bytegrad
EPOCHS    ?= 10
DATASET   ?= mnist

# make train-text
RATE  ?= 10
STEPS ?= 450
train-text: ALGORITHM := ddp diloco sparse_loco

ifeq ($(PYTHON),$(VENV)/bin/python)
INSTALLED := $(VENV)/installed
else
# An interpreter of one's own: nothing is installed, the package is used from here.
export PYTHONPATH := $(CURDIR)
endif

# Python compiles what is imported, which is a part of what is installed.
PIP := $(VENV)/bin/python -m pip install -qq --no-compile --constraint constraints.txt
# Half of all bytes, which are unpacked on one core while the other one unpacks the rest.
LARGE := torch triton

# make test: ranks that are threads wait for each other, so that three workers keep two cores busy.
WORKERS         ?= 3
PYTEST          := $(PYTHON) -m pytest --dist worksteal --durations=20 --durations-min=2
# Where bytecode is not kept, all workers and all processes that tests start compile the same files again.
test test-all test-rest: export PYTHONDONTWRITEBYTECODE :=
EMULATED_TESTS  := tests/compression tests/docs tests/launchers
test-all:  TIER := --all
# What `make test` leaves out of `make test-all`; hypothesis draws more examples there.
test-rest: TIER := --all
test-rest: REST := and (slow or beyond or hypothesis)

.PHONY: help train train-text tradeoff test test-all test-rest lint format bench gpu-check wheel clean

help:
	@echo "make train        train a small network with two processes (NPROC=$(NPROC) ALGORITHM=$(ALGORITHM) EPOCHS=$(EPOCHS) DATASET=$(DATASET))"
	@echo "make train-text   train a transformer behind lines of RATE=$(RATE) Mbit/s (NPROC=$(NPROC) STEPS=$(STEPS) ALGORITHM=...)"
	@echo "make test         every test function that is not slow, on a sample of its parameters; minutes"
	@echo "make test-all     all combinations of parameters, and the tests that take long; half an hour"
	@echo "make lint         ruff and mypy          make format   let ruff rewrite the code"
	@echo "make tradeoff     which algorithm reaches an accuracy first, on two emulated networks; minutes, as root"
	@echo "make bench        benchmarks             make gpu-check   kernels on this machine's GPU"
	@echo "make wheel        wheel and sdist in dist/   make clean   remove what the other targets made"

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV), which takes a minute or two"
	@python3 -m venv $(VENV)
	@$(PIP) --no-deps $(LARGE) & large=$$!; \
	$(PIP) --no-deps $$(grep -vE '^#|^(torch|triton|pip)=' constraints.txt) && wait $$large
	@$(PIP) --no-build-isolation --editable ".[examples,test,lint]"
	@touch $@

train: $(INSTALLED)
	$(PYTHON) examples/train_images.py --nproc $(NPROC) --algorithm $(ALGORITHM) --epochs $(EPOCHS) --dataset $(DATASET)

train-text: $(INSTALLED)
	$(PYTHON) examples/train_text.py --nproc $(NPROC) --rate $(RATE) --steps $(STEPS) --algorithm $(ALGORITHM)

# Kernels for GPUs run in Triton's interpreter and Numba's simulator. No rank waits there, so that a worker per core is enough.
define EMULATED
	TRITON_INTERPRET=1 $(PYTEST) $(EMULATED_TESTS) $(TIER) -n 2 -m "not processes $(REST)"
	NUMBA_ENABLE_CUDASIM=1 $(PYTEST) $(EMULATED_TESTS) $(TIER) -n 2 -m "not processes $(REST)"
endef

test: $(INSTALLED)
	$(PYTEST) tests -n $(WORKERS)
	$(EMULATED)

# The long tests of processes have limits of time, and the others keep both cores busy.
test-all test-rest: $(INSTALLED)
	$(PYTEST) tests $(TIER) -n $(WORKERS) -m "not processes $(REST)"
	$(PYTEST) tests $(TIER) -n $(WORKERS) -m "processes $(REST)"
	$(EMULATED)

lint: $(INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy examples/train_images.py examples/train_text.py tests/algorithms/misspelled_options.py

format: $(INSTALLED)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench: $(INSTALLED)
	$(PYTHON) -m pytest bench --full

tradeoff: $(INSTALLED)
	$(PYTHON) -m bench.tradeoff --output results/tradeoff.json --plot results/tradeoff.png

gpu-check: $(INSTALLED)
	$(PYTHON) -m bench.gpu_check

wheel: $(INSTALLED)
	$(PYTHON) -m build --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) build dist results *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks .coverage .kernel_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
