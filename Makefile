# `make help` says what there is. Everything runs in .venv, which `make setup` makes.
SHELL := /bin/sh
VENV := .venv
RUN := $(VENV)/bin/python

# The first Python that starts and that the frameworks support.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	"$$p" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
	2>/dev/null && echo "$$p" && break; done)

# An index with CPU builds of torch, for machines where pip would bring CUDA's several GB.
export TORCH_INDEX

# Several ranks share this machine's cores: a second thread per rank makes them many times slower.
export OMP_NUM_THREADS ?= 1
# Open MPI refuses to start as root (containers) or more ranks than cores unless told.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export OMPI_MCA_rmaps_base_oversubscribe = 1
# horovodrun and mpirun find each other, and their Python, on PATH.
IN_VENV = PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
NETBENCH = runs/netbench

.PHONY: help setup demo test check bench bench-network bench-accuracy bench-kernels bench-averaging doctor clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r t d; \
		do printf '  make %-16s %s\n' "$$t" "$$d"; done

setup: ## make .venv with PyTorch, TensorFlow, Open MPI and Horovod (CPU); quick when up to date
	@test -n "$(PYTHON)" || { echo "setup: no Python 3.10 to 3.13 was found: install it" \
		"(Debian: apt-get install python3.11 python3.11-venv python3.11-dev)." >&2; exit 1; }
	@$(PYTHON) scripts/setup_env.py

demo: setup ## a first look: digits with four workers, in PyTorch and in Keras
	@$(IN_VENV) $(RUN) scripts/demo.py

test: setup ## run the tests; PYTEST_ARGS adds options
	@$(IN_VENV) NEED_LAUNCHERS=1 $(RUN) -m pytest tests $(PYTEST_ARGS)

check: setup ## ruff and mypy
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy

bench: setup ## measure against plain Horovod
	@$(IN_VENV) $(RUN) scripts/bench.py

bench-network: setup ## measure on limited links, for docs/performance.md (root; half an hour)
	@$(IN_VENV) $(RUN) scripts/netbench.py bench --framework torch --output $(NETBENCH)/torch.json
	@$(IN_VENV) $(RUN) scripts/netbench.py bench --framework keras --output $(NETBENCH)/keras.json
	@$(IN_VENV) $(RUN) scripts/netbench.py report $(NETBENCH)/torch.json $(NETBENCH)/keras.json

bench-accuracy: setup ## time to an accuracy on limited links, for docs/accuracy.md (root; 45 minutes)
	@$(IN_VENV) $(RUN) scripts/netbench.py accuracy --output $(NETBENCH)/accuracy.json
	@$(IN_VENV) $(RUN) scripts/netbench.py report $(NETBENCH)/accuracy.json

bench-kernels: setup ## measure what compressors compute, for docs/kernels.md (five minutes)
	@$(IN_VENV) $(RUN) scripts/kernels.py --output docs/kernels.md

bench-averaging: setup ## measure averaging of models when ranks are late, for docs/averaging.md
	@$(IN_VENV) $(RUN) scripts/bench_averaging.py

doctor: setup ## say what works here and what to do about the rest
	@$(IN_VENV) $(RUN) -m accordion_hvd.doctor

clean: ## remove .venv, caches and build leftovers (not runs/, nor the cached Horovod wheel)
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
