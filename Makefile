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
BOTH_CORES = -n 2 --no-loadscope-reorder
JUNIT = --junitxml=runs/tests
# It is no failure (5) if PYTEST_ARGS chooses tests of one part only.
IN_TESTS = $(IN_VENV) NEED_LAUNCHERS=1 sh -c
PYTEST = $(IN_TESTS) '$(RUN) -m pytest "$$@"; test $$? = 0 -o $$? = 5' - tests
COVERAGE = $(VENV)/bin/coverage
COVERED = $(IN_TESTS) '$(COVERAGE) run -m pytest "$$@"; test $$? = 0 -o $$? = 5' - tests
OPTBENCH = runs/optbench
GRAPH = runs/graph

.PHONY: help setup demo test test-all test-times coverage fuzz check docs bench bench-network bench-excess bench-plan bench-accuracy bench-goodput \
	bench-optimizers bench-kernels bench-compressors bench-graph bench-averaging bench-transformers results faults storm dist dist-try dist-lowest doctor clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r t d; \
		do printf '  make %-16s %s\n' "$$t" "$$d"; done

SET_UP = test -n "$(PYTHON)" || { echo "setup: no Python 3.10 to 3.13 was found: install it" \
	"(Debian: apt-get install python3.11 python3.11-venv python3.11-dev)." >&2; exit 1; }; \
	$(PYTHON) scripts/setup_env.py

setup: ## make .venv with PyTorch, TensorFlow, Open MPI and Horovod (CPU); quick when up to date
	@$(SET_UP)

demo: ## a first look: digits with four workers, in PyTorch and in Keras
	@$(SET_UP) demo
	@$(IN_VENV) $(RUN) scripts/demo.py

test: setup ## run the tests that must pass before a commit lands; PYTEST_ARGS adds options
	@$(PYTEST) -m "not nightly" $(BOTH_CORES) $(JUNIT)/test.xml $(PYTEST_ARGS)

test-all: export ALL_TESTS = 1
test-all: setup ## run all tests, and record the result in tests/last_test_all.json
	@$(PYTEST) -m "not quiet" $(BOTH_CORES) $(JUNIT)/all-tests.xml $(PYTEST_ARGS)
	@$(PYTEST) -m quiet $(JUNIT)/all-quiet.xml $(PYTEST_ARGS)
	@test -n "$(PYTEST_ARGS)" || $(RUN) tests/support/record.py write runs/tests/all-*.xml

test-times: ## the same as make test, and print the CPU seconds of files and launches
	@$(MAKE) --no-print-directory test PYTEST_ARGS="--times $(PYTEST_ARGS)"

coverage: setup ## run the tests and report which lines ran: runs/coverage/index.html
	@mkdir -p runs/coverage
	@$(COVERAGE) erase
	@$(COVERED) -m "not nightly" $(BOTH_CORES) $(PYTEST_ARGS)
	@$(COVERAGE) combine -q
	@$(COVERAGE) html -q
	@$(COVERAGE) report

fuzz: setup ## try payloads, spec strings, configurations, checkpoints; FUZZ_INPUTS says how many
	@FUZZ_INPUTS=$${FUZZ_INPUTS:-1000000} $(IN_VENV) $(RUN) -m pytest -q --timeout 0 tests/fuzz

check: setup ## ruff, mypy, the layers of imports and the budget of lines
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache
	@$(RUN) scripts/budget.py
	@$(RUN) tests/support/record.py check

docs: setup ## build the documentation site: runs/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "Open runs/site/index.html. To search the site, run python -m http.server -d runs/site."

bench: setup ## measure against plain Horovod
	@$(IN_VENV) $(RUN) scripts/bench.py

bench-network: setup ## measure on limited links, for docs/performance.md (root; two hours; it resumes)
	@for model in vgg resnet gpt; do \
		test -e $(NETBENCH)/$$model.json || $(IN_VENV) $(RUN) scripts/netbench.py bench \
			--framework torch --model $$model --output $(NETBENCH)/$$model.json || exit 1; done
	@test -e $(NETBENCH)/sharded.json || $(IN_VENV) $(RUN) scripts/netbench.py bench --hosts 2 --per-host 2 --model gpt \
		--methods 'HSDP.*' --rates 200mbit --output $(NETBENCH)/sharded.json
	@test -e $(NETBENCH)/keras.json || $(IN_VENV) $(RUN) scripts/netbench.py bench --framework keras --output $(NETBENCH)/keras.json
	@$(IN_VENV) $(RUN) scripts/netbench.py report \
		$(addprefix $(NETBENCH)/,vgg.json resnet.json gpt.json sharded.json keras.json)

bench-excess: setup ## PowerSGD beside DDP's own hook at 200 Mbit/s (root; 12 minutes; it resumes)
	@for model in vgg resnet gpt; do \
		test -e $(NETBENCH)/excess-$$model.json || $(IN_VENV) $(RUN) scripts/netbench.py bench \
			--model $$model --rates 200mbit --methods "(DDP|.*torch.distributed|.*our hook) powersgd:([14]|4,wire='float16')" \
			--output $(NETBENCH)/excess-$$model.json || exit 1; done

bench-plan: setup ## measure the predictions of accordion-hvd plan, for docs/plan.md (root; 80 minutes)
	@$(IN_VENV) $(RUN) scripts/bench_plan.py measure
	@$(IN_VENV) $(RUN) scripts/bench_plan.py report

bench-accuracy: setup ## time to an accuracy on limited links, for docs/accuracy.md (root; an hour; it resumes)
	@$(IN_VENV) $(RUN) scripts/netbench.py accuracy --output $(NETBENCH)/accuracy.json
	@$(IN_VENV) $(RUN) scripts/netbench.py report $(NETBENCH)/accuracy.json

bench-goodput: setup ## Goodput beside its levels on limited links, for docs/goodput.md (root; two hours; it resumes)
	@$(IN_VENV) $(RUN) scripts/netbench.py accuracy --page goodput --output $(NETBENCH)/goodput.json
	@$(IN_VENV) $(RUN) scripts/netbench.py report $(NETBENCH)/goodput.json

bench-optimizers: setup ## compressed optimizers against Adam, for docs/optimizers.md (links: root)
	@$(IN_VENV) $(RUN) scripts/bench_optimizers.py run --output $(OPTBENCH)/accuracy.json
	@test "$$(id -u)" != 0 || $(IN_VENV) $(RUN) scripts/netbench.py bench --methods 'optimizer .*' \
		--rates 50mbit 200mbit --output $(OPTBENCH)/links.json
	@$(IN_VENV) $(RUN) scripts/bench_optimizers.py report $(OPTBENCH)/*.json

bench-kernels: setup ## measure what compressors compute, for docs/kernels.md (five minutes)
	@$(IN_VENV) GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(RUN) scripts/kernels.py \
		--output docs/kernels.md

bench-compressors: setup ## train with each compressor, for docs/compressor-accuracy.md (three hours)
	@$(IN_VENV) $(RUN) scripts/train_compressors.py --output docs/compressor-accuracy.md

bench-graph: setup ## what skewed neighbour sampling saves, for docs/graph.md (root; half an hour; it resumes)
	@for data in cora citeseer blocks; do \
		test -e $(GRAPH)/$$data/result.png || $(IN_VENV) $(VENV)/bin/horovodrun --gloo -np 4 $(RUN) \
		scripts/train_gcn.py --config configs/gcn_$$data.yaml --output $(GRAPH) || exit 1; done
	@for keys in "links" "links_int8 --wire int8"; do \
		test -e $(GRAPH)/$${keys%% *}/result.png || $(IN_VENV) $(RUN) \
		scripts/netbench.py run --hosts 4 --rate 200mbit -- $(RUN) scripts/train_gcn.py \
		--config configs/gcn_links.yaml --name $$keys --output $(GRAPH) || exit 1; done
	@for part in moments sampling; do \
		test -e $(GRAPH)/$$part.json || $(IN_VENV) $(RUN) scripts/graph.py $$part --output $(GRAPH)/$$part.json || exit 1; done
	@$(IN_VENV) $(RUN) scripts/graph.py report $(GRAPH)

bench-averaging: setup ## averaging of models when ranks are late, for docs/averaging.md (80 minutes)
	@$(IN_VENV) $(RUN) scripts/bench_averaging.py

results: setup ## Accordion and its competitors, for docs/results.md (a night; what is trained is kept)
	@$(IN_VENV) $(RUN) scripts/results.py

bench-transformers: setup ## Transformers with AdamW, for docs/transformers.md (days; what is trained is kept)
	@$(IN_VENV) $(RUN) scripts/transformers.py

faults: setup ## what ranks do when one of them fails, for docs/reliability.md (65 minutes)
	@$(IN_VENV) $(RUN) scripts/reliability.py faults

storm: setup ## elastic trainings while ranks die, leave and join, for docs/reliability.md (root; two hours)
	@$(IN_VENV) $(RUN) scripts/reliability.py storm
	@$(IN_VENV) $(RUN) scripts/reliability.py storm torchft "torchft powersgd:4" --pace 0.8
	@$(IN_VENV) $(RUN) scripts/reliability.py report

dist: setup ## build the source archive and the wheel into dist
	@$(RUN) scripts/release.py build

dist-try: setup ## install both into fresh environments, and train (ten minutes)
	@$(RUN) scripts/release.py try

dist-lowest: setup ## the same with the lowest versions of setup.cfg, and tests (half an hour)
	@$(RUN) scripts/release.py lowest

doctor: setup ## say what works here and what to do about the rest
	@$(IN_VENV) $(RUN) -m accordion_hvd.tools.doctor

clean: ## remove .venv, caches and build leftovers (not runs/, nor the cached Horovod wheel)
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
