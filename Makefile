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
WORKERS ?= 3
# make test-rest: what `python -m tests.runs --help` prints, for example OPTIONS="--reached --minutes 10".
OPTIONS ?=
# Where bytecode is not kept, all workers and all processes that tests start compile the same files again.
test test-all test-rest test-overlay: export PYTHONDONTWRITEBYTECODE :=
# Workers keep all cores busy: threads of PyTorch's own took a tenth more of the processors' time.
test test-all test-rest test-overlay: export OMP_NUM_THREADS ?= 1

.PHONY: help train train-text finetune adoption tradeoff track test test-all test-doors docs docs-look test-rest test-oldest test-newest reach mutations overlay test-overlay lint format bench gpu-check gpu-digests wheel release clean

help:
	@echo "make train        train a small network with two processes (NPROC=$(NPROC) ALGORITHM=$(ALGORITHM) EPOCHS=$(EPOCHS) DATASET=$(DATASET))"
	@echo "make train-text   train a transformer behind lines of RATE=$(RATE) Mbit/s (NPROC=$(NPROC) STEPS=$(STEPS) ALGORITHM=...)"
	@echo "make test         every test function that is not slow, on a sample of its parameters; minutes"
	@echo "make test-all     all combinations of parameters, and the tests that take long; hours on two cores"
	@echo "make test-rest    what make test leaves out of make test-all; OPTIONS=--sample for what the last changes reach, 25 minutes"
	@echo "make reach        prints the last changes and the tests that they reach"
	@echo "make mutations    puts 40 faults into copies of the code, each of which the tests have to notice; a quarter of an hour"
	@echo "make test-overlay tests with packages of the machine that has a GPU, which make overlay installs into .overlay"
	@echo "make test-doors   tests with Lightning, Accelerate, Transformers and Ray, in an environment of their own; ten minutes"
	@echo "make test-oldest  make test for ten minutes with the oldest versions that are allowed; make test-newest with the newest ones"
	@echo "make docs         the documentation site, in build/docs; minutes      make docs-look   pictures of it, by chromium"
	@echo "make lint         ruff and mypy          make format   let ruff rewrite the code"
	@echo "make finetune     LoRA on two emulated hosts, through Accelerate; eight minutes, as root"
	@echo "make adoption     ten programs with DDP, and with an algorithm in its place; ten minutes"
	@echo "make tradeoff     which algorithm reaches an accuracy first, on two emulated networks; minutes, as root"
	@echo "make track        ways of training, other packages' too, for the same time on slow links; CELLS=...; 45 minutes a cell, as root"
	@echo "make bench        benchmarks             make gpu-check   checks this machine's GPU (STAGES=...)"
	@echo "make release      wheel and sdist in dist/, tried in a fresh environment, and a tag on this machine (RELEASE_TAG=no for none)"
	@echo "make wheel        wheel and sdist in dist/   make clean   remove what the other targets made"

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV), which takes a minute or two"
	@python3 -m venv $(VENV)
	@$(PIP) --no-deps $(LARGE) & large=$$!; \
	$(PIP) --no-deps $$(grep -vE '^#|^(torch|triton|pip)=' constraints.txt) && wait $$large
	@$(PIP) --no-build-isolation --editable ".[examples,test,lint]"
	@touch $@

# Packages that .venv must not have: CuPy with NCCL, and another Triton. Each folder is on the path of the runs that ask for it.
OVERLAY     := .overlay
OVERLAY_PIP := $(PYTHON) -m pip install -qq --no-compile --no-deps --constraint constraints-gpu.txt

overlay: $(OVERLAY)/installed

$(OVERLAY)/installed: constraints-gpu.txt | $(INSTALLED)
	@echo "installing into $(OVERLAY), 450 MB to download"
	@rm -rf $(OVERLAY)
	@$(OVERLAY_PIP) --target $(OVERLAY)/nccl cupy-cuda13x nvidia-nccl-cu13
	@$(OVERLAY_PIP) --target $(OVERLAY)/triton triton "numpy; python_version >= '3.12'"
	@touch $@

# An environment of its own: what constraints.txt has, but for some packages, and what another file has.
define environment
	@echo "installing into $(@D), which takes a minute or two"
	@python3 -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --no-deps --no-compile $$(grep -hvE '^#|^($(1))=' constraints.txt $(2))
endef

# Libraries that doors lead into, which .venv does without.
DOORS := .venv-doors

$(DOORS)/installed: pyproject.toml constraints.txt constraints-doors.txt
	$(call environment,triton|pip,constraints-doors.txt)
	@$(DOORS)/bin/python -m pip install -qq --no-deps --no-build-isolation --editable .
	@touch $@

test-doors: export PYTHONDONTWRITEBYTECODE :=
test-doors: export OMP_NUM_THREADS ?= 1
test-doors: $(DOORS)/installed
	$(DOORS)/bin/python -m pytest -q -n 2 tests/doors $(OPTIONS)

# Other packages, which the track compares with this one.
TRACK := .venv-track

$(TRACK)/installed: pyproject.toml constraints.txt constraints-track.txt
	$(call environment,triton|pip|mlxtend|numba.*|cuda-.*|nvidia-.*,constraints-track.txt)
	@touch $@

# CELLS="10-0-equal 10-0-slow 100-0-equal 100-0-slow" take three quarters of an hour each, as root; what is measured already stays.
CELLS ?= 10-0-equal 10-0-slow 100-0-equal 100-0-slow
track: $(INSTALLED) $(TRACK)/installed
	$(PYTHON) -m bench.track --cells $(CELLS) --output bench/results/track.json --plot bench/results/track.png $(OPTIONS)

# What builds the documentation site. Pages import the package, but none of what needs a GPU.
DOCS := .venv-docs

$(DOCS)/installed: pyproject.toml constraints.txt constraints-docs.txt
	$(call environment,triton|pip|mlxtend|numba-cuda|cuda-.*|nvidia-.*,constraints-docs.txt)
	@touch $@

docs docs-look: export OMP_NUM_THREADS ?= 1
docs: $(DOCS)/installed
	$(DOCS)/bin/python -m docs.site $(OPTIONS)

# Debian's chromium takes the pictures.
docs-look: $(DOCS)/installed
	@test -f build/docs/index.html || $(MAKE) docs
	$(DOCS)/bin/python -m docs.site --look

# LoRA through PEFT and Accelerate on two emulated hosts; eight minutes, as root.
finetune: $(DOORS)/installed
	$(DOORS)/bin/python examples/finetune_lora.py $(OPTIONS)

# Ten programs with DDP, and with an algorithm; ten minutes.
adoption: $(DOORS)/installed
	$(DOORS)/bin/python -m bench.adoption $(OPTIONS)

train: $(INSTALLED)
	$(PYTHON) examples/train_images.py --nproc $(NPROC) --algorithm $(ALGORITHM) --epochs $(EPOCHS) --dataset $(DATASET)

train-text: $(INSTALLED)
	$(PYTHON) examples/train_text.py --nproc $(NPROC) --rate $(RATE) --steps $(STEPS) --algorithm $(ALGORITHM)

# tests/runs.py lists the runs of pytest, all of which take place.
test-overlay: $(OVERLAY)/installed
test test-all test-rest test-overlay: $(INSTALLED)
	$(PYTHON) -m tests.runs $@ --workers $(WORKERS) $(OPTIONS)

# make test-oldest OPTIONS="--index https://download.pytorch.org/whl/cpu" where pip finds no CPU build of torch by itself.
test-oldest test-newest: $(INSTALLED)
	$(PYTHON) -m tests.versions $(@:test-%=%) $(OPTIONS)

reach: $(INSTALLED)
	$(PYTHON) -m tests.reach $(OPTIONS)

# make mutations OPTIONS="--only 3 4"
mutations: $(INSTALLED)
	$(PYTHON) -m tests.mutations $(OPTIONS)

lint: $(INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy --package docs.site
	$(PYTHON) -m mypy examples/train_images.py examples/train_text.py examples/train_flights.py examples/train_speech.py examples/elastic_restart.py tests/algorithms/misspelled_options.py tests/algorithms/classes_of_specs.py

format: $(INSTALLED)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench: $(INSTALLED)
	$(PYTHON) -m pytest bench --full

tradeoff: $(INSTALLED)
	$(PYTHON) -m bench.tradeoff --output results/tradeoff.json --plot results/tradeoff.png

# make gpu-check STAGES="speed bytes"
gpu-check: $(INSTALLED)
	$(PYTHON) -m bench.gpu --stages "$(STAGES)"

# What the CPU computes, for machines with a GPU to compare with. Compiles kernels for a quarter of an hour.
gpu-digests: $(INSTALLED)
	$(PYTHON) -m bench.gpu.digests

wheel: $(INSTALLED)
	$(PYTHON) -m build --no-isolation --outdir dist .

# The tag needs a tree without changes. Nothing is pushed.
RELEASE_TAG ?= yes
release: $(INSTALLED)
	$(PYTHON) -m tests.release --tag $(RELEASE_TAG)

clean:
	rm -rf $(VENV) $(OVERLAY) $(DOORS) $(DOCS) $(TRACK) .venv-oldest .venv-newest build dist results *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks .coverage .kernel_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
