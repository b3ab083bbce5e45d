# One word for each thing one does here; `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := requirements.lock
# What starts here starts hundreds of processes; where this is set, each compiles Django and torch anew.
export PYTHONDONTWRITEBYTECODE :=
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c $(LOCK)

.DEFAULT_GOAL := help
.PHONY: help up screens stand-in test test-all lint lock format parity memory mutations witness schemathesis openapi security faults cluster diagnose slow postgres mix slurm image-test containers bubblewrap bench load bench-rivals gpu traces scripts docs pictures release clean tools

help: ## list the targets
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Meshboard needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "Python's venv module is missing: apt-get install python3-venv" >&2; exit 1; }

# The stamps keep a second run off the network.
$(VENV)/.run: pyproject.toml $(LOCK) | $(BIN)/python
	@echo "Installing Python packages into $(VENV). The first installation takes a few minutes."
	$(subst --quiet,--progress-bar on,$(INSTALL)) -e '.[web,worker,local,docs]'
	@# Ranks of other users cannot write here: without this, each rank compiles torch again.
	@$(BIN)/python -c 'import workers.trainer.__main__'
	@touch $@

$(VENV)/.dev: $(VENV)/.run client/pyproject.toml
	$(INSTALL) -e '.[web,worker,local,docs,dev]' -e ./client
	@touch $@

$(VENV)/.mlflow: $(VENV)/.dev
	$(INSTALL) -e '.[mlflow]'
	@touch $@

# A board without them says so: what is wrong in a page keeps nobody from starting one.
docs/site/index.html: $(VENV)/.run $(shell find docs manual client/meshboard jobs planner webapp -name site -prune -o -name '*.md' -print -o -name '*.py' -print)
	@echo "Building the documentation."
	-@$(BIN)/python -m manual

# A board of root starts jobs as other users. Without bubblewrap, these users need access to Python and to this checkout.
bubblewrap:
	@command -v bwrap >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || { \
	  echo "Installing bubblewrap, which isolates jobs."; \
	  { apt-get update -qq; apt-get install -y -qq --no-install-recommends bubblewrap; } >/dev/null 2>&1 || \
	  echo "apt-get cannot install bubblewrap." >&2; }

up: $(VENV)/.run docs/site/index.html bubblewrap ## start everything on this machine; Ctrl-C stops it
	@exec $(BIN)/python -m webapp.runner

# Tools that check the JavaScript of the pages. Nothing of it is needed to run Meshboard.
node_modules/.installed: package.json package-lock.json
	@sh tests/install_tools.sh node
	@npm ci --silent
	@touch $@

# Types of the REST answers, for the type checker.
webapp/types/api.d.ts: docs/openapi.json node_modules/.installed
	@node_modules/.bin/openapi-typescript docs/openapi.json --output $@ >/dev/null
	@touch $@

tools: # what the tests drive from outside Python
	@sh tests/install_tools.sh

PYTEST_ALL = $(BIN)/python -m pytest tests -n 4 --dist loadscope --no-loadscope-reorder --durations 20

test: $(VENV)/.dev tools ## run the default tests in four processes
	node --test tests/js/*.test.js
	$(PYTEST_ALL)

test-all: $(VENV)/.mlflow tools ## run the default, extended, and slow tests, and write tests/durations.csv
	node --test tests/js/*.test.js
	$(PYTEST_ALL) -m 'not slow' --write-durations
	$(MAKE) slow

lint: $(VENV)/.dev webapp/types/api.d.ts ## check lint, format, types, and imports between packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --no-fast-exit
	node_modules/.bin/eslint
	node_modules/.bin/tsc
	$(BIN)/python -m pytest -q tests/test_import_layers.py tests/test_imports.py

docs: $(VENV)/.dev ## build the documentation in docs/site, which the board serves at /docs; fails on warnings
	@$(BIN)/python -m manual

release: docs ## build sdists and wheels of server and client in dist/, with the documentation
	rm -rf dist build
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m build --no-isolation --outdir dist client

lock: $(VENV)/.dev ## pin each package at its newest allowed version
	$(BIN)/uv pip compile --quiet --upgrade --universal --all-extras --no-annotate \
	  --custom-compile-command 'make lock' --output-file $(LOCK) pyproject.toml

format: $(VENV)/.dev ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

parity: $(VENV)/.dev ## compare each layout with a single-process reference; prints the table
	$(BIN)/python -m tests.parity

memory: $(VENV)/.dev ## compare predicted memory of random layouts with dry runs; prints the table
	$(BIN)/python -W ignore -m tests.memory

mutations: $(VENV)/.dev ## inject faults into a copy of the trainer and list the checks that find them; prints the table
	$(BIN)/python -m tests.mutations

witness: $(VENV)/.dev ## compare the meter's bytes with kernel counters, in network namespaces; prints the table; needs root
	$(BIN)/python -m tests.witness

schemathesis: $(VENV)/.dev tools ## send thousands of requests from the OpenAPI document; prints failures
	$(BIN)/python -m tests.fuzz_api

openapi: $(VENV)/.dev ## write docs/openapi.json and the client types; refuses incompatible changes of version 1
	DJANGO_SETTINGS_MODULE=tests.settings $(BIN)/python manage.py openapi
	$(BIN)/python -m manual.client_types

security: $(VENV)/.dev ## run bandit and pip-audit, check licenses, and write var/sbom.cdx.json; SECURITY="--advisories FOLDER" runs offline
	$(BIN)/python -m tests.security $(SECURITY)

faults: $(VENV)/.dev tools ## kill processes and check the recovery; prints the table
	$(BIN)/python -m tests.faults

screens: $(VENV)/.dev tools ## save pictures of each page in var/screens, at two widths and in both themes, and report layout faults
	$(BIN)/python -m tests.screens

pictures: $(VENV)/.dev tools ## take the pictures of the documentation from real runs, in docs/pictures
	$(BIN)/python -m tests.screens.pictures

stand-in: $(VENV)/.dev ## test the CUDA and NCCL path of the trainer without a GPU; CUDA_PYTHON=PATH is a Python with a CUDA build of torch
	$(BIN)/python -m tests.stand_in --python $(CUDA_PYTHON) $(STAND_IN)

cluster: $(VENV)/.dev tools ## test multi-host jobs and their faults in network namespaces; prints the table; needs root
	$(BIN)/python -m tests.cluster

diagnose: $(VENV)/.dev ## inject faults into real runs and list the verdicts; prints the table; DIAGNOSE="--seconds 360"
	$(BIN)/python -m tests.diagnosis $(DIAGNOSE)

slow: $(VENV)/.mlflow tools ## run the tests that wait for real deadlines
	MESHBOARD_PATIENCE=1 $(BIN)/python -m pytest tests -m slow --ignore tests/cluster --ignore tests/slurm --ignore tests/containers

postgres: $(VENV)/.dev tools ## run the tests of the board on PostgreSQL instead of SQLite
	$(BIN)/python -m tests.on_postgres

mix: $(VENV)/.dev ## run small jobs for ten minutes while parts of Meshboard fail at random; prints problems; needs root; MIX="--seconds 60 --seed 7"
	$(BIN)/python -m tests.faults.mix $(MIX)

slurm: $(VENV)/.dev ## test the Slurm engine on a local Slurm, installed with apt; needs root
	@sh tests/slurm/install_tools.sh
	$(BIN)/python -m tests.slurm

image-test: $(VENV)/.dev ## run the steps of the Dockerfile on a copy of the files of this machine; needs root
	$(BIN)/python -m tests.image

containers: $(VENV)/.dev ## build both images and run docker-compose.yml on a container engine; prints the table; CONTAINERS="--override FILE"
	$(BIN)/python -m tests.containers $(CONTAINERS)

bench: bench-metering bench-launch bench-eager bench-latency bench-planner bench-giants bench-calibration bench-training bench-dry_run bench-scheduling bench-fleet bench-listing bench-pages bench-history bench-viewer bench-pictures bench-long_context ## run all benchmarks

load: bench-load ## load a board of 10,000 jobs with submits, lists, and sockets at the same time; fails if a job is lost

bench-rivals: $(VENV)/.dev ## compare with the train.py of other projects: RIVALS="--nanogpt PATH --picotron PATH", their checkouts
	$(BIN)/python -m benchmarks.rivals $(RIVALS)

bench-published: $(VENV)/.dev ## compare the planner with published measurements; ROWS='file.csv ...'
	$(BIN)/python -m benchmarks.published --rows $(ROWS)

traces: $(VENV)/.dev ## compare imports of Kineto traces with a separate count of the raw events; TRACES=folder
	TRACES="$(TRACES)" $(BIN)/python -m pytest -q -s tests/jobs/traces/test_trace_counts.py

scripts: $(VENV)/.dev ## run public training scripts with and without the meter; SCRIPTS=folder of checkouts
	SCRIPTS="$(SCRIPTS)" $(BIN)/python -m benchmarks.public_scripts

gpu: $(VENV)/.dev ## compare meter, parity, memory, rates, and MFU with the plan on GPUs; GPU="--docs", "--small"
	$(BIN)/python -m benchmarks.gpu $(GPU)

bench-%: $(VENV)/.dev
	$(BIN)/python -m benchmarks.$*

clean: ## remove the environment and all state, including jobs and logs in var/, without confirmation
	rm -rf $(VENV) node_modules webapp/types/api.d.ts var build dist docs/site *.egg-info .mypy_cache .ruff_cache .pytest_cache
