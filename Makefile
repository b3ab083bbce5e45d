# One word for each thing one does here; `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := requirements.lock
# What starts here starts hundreds of processes; where this is set, each compiles Django and torch anew.
export PYTHONDONTWRITEBYTECODE :=
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c $(LOCK)

.DEFAULT_GOAL := help
.PHONY: help up screens stand-in test lint lock format parity memory mutations witness schemathesis openapi security faults cluster diagnose slow postgres mix slurm image-test bench load bench-rivals gpu docs pictures release clean tools

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
	@touch $@

$(VENV)/.dev: $(VENV)/.run client/pyproject.toml
	$(INSTALL) -e '.[web,worker,local,docs,dev]' -e ./client
	@touch $@

$(VENV)/.mlflow: $(VENV)/.dev
	$(INSTALL) -e '.[mlflow]'
	@touch $@

# A board without them says so: what is wrong in a page keeps nobody from starting one.
docs/site/index.html: $(VENV)/.run $(shell find docs manual client/meshboard jobs planner webapp -name site -prune -o -name '*.md' -print -o -name '*.py' -print)
	-@$(BIN)/python -m manual

up: $(VENV)/.run docs/site/index.html ## start everything on this machine; Ctrl-C stops it
	@exec $(BIN)/python -m webapp.runner

tools: # what the tests drive from outside Python
	@sh tests/install_tools.sh

test: $(VENV)/.dev tools ## the default test suite, in four processes
	$(BIN)/python -m pytest tests -n 4 --dist loadscope --no-loadscope-reorder --durations 40

lint: $(VENV)/.dev ## lint, format, types, and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --no-fast-exit
	$(BIN)/python -m pytest -q tests/test_floors.py tests/test_imports.py

docs: $(VENV)/.dev ## the documentation as a site in docs/site, which a board serves under /docs; a warning fails
	@$(BIN)/python -m manual

release: docs ## sdists and wheels of server and client, the documentation inside, into dist/
	rm -rf dist build
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m build --no-isolation --outdir dist client

lock: $(VENV)/.dev ## pin each package at its newest allowed version
	$(BIN)/uv pip compile --quiet --upgrade --universal --all-extras --no-annotate \
	  --custom-compile-command 'make lock' --output-file $(LOCK) pyproject.toml

format: $(VENV)/.dev ## let ruff rewrite the code
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
	$(BIN)/python -m manual.answers

security: $(VENV)/.dev ## bandit, pip-audit, licences and var/sbom.cdx.json; SECURITY="--advisories FOLDER" needs no network
	$(BIN)/python -m tests.security $(SECURITY)

faults: $(VENV)/.dev tools ## kill things and watch; prints the table
	$(BIN)/python -m tests.faults

screens: $(VENV)/.dev tools ## save pictures of each page in var/screens, at two widths and in both themes, and report layout faults
	$(BIN)/python -m tests.screens

pictures: $(VENV)/.dev tools ## the pictures of the documentation, of real runs on a board of its own, into docs/pictures
	$(BIN)/python -m tests.screens.pictures

stand-in: $(VENV)/.dev ## the trainer's CUDA and NCCL path on a machine without a GPU, with a single-process reference: CUDA_PYTHON=PATH, a Python with a CUDA build of torch
	$(BIN)/python -m tests.stand_in --python $(CUDA_PYTHON) $(STAND_IN)

cluster: $(VENV)/.dev tools ## gangs over hosts in network namespaces, and their faults; prints the table; needs root
	$(BIN)/python -m tests.cluster

diagnose: $(VENV)/.dev ## inject faults into real runs and list the verdicts; prints the table; DIAGNOSE="--seconds 360"
	$(BIN)/python -m tests.diagnosis $(DIAGNOSE)

slow: $(VENV)/.mlflow tools ## tests that wait for real deadlines, not part of the default suite
	MESHBOARD_PATIENCE=1 $(BIN)/python -m pytest tests -m slow --ignore tests/cluster --ignore tests/slurm

postgres: $(VENV)/.dev tools ## the board's tests on PostgreSQL, which the default suite has on SQLite
	$(BIN)/python -m tests.on_postgres

mix: $(VENV)/.dev ## ten minutes of small jobs while everything is killed at random; MIX="--seconds 60 --seed 7"
	$(BIN)/python -m tests.faults.mix $(MIX)

slurm: $(VENV)/.dev ## the Slurm engine on a real Slurm of this machine's own; installs it by apt; needs root
	@sh tests/slurm/install_tools.sh
	$(BIN)/python -m tests.slurm

image-test: $(VENV)/.dev ## the Dockerfile's own steps, run on a copy of this machine's files; needs root
	$(BIN)/python -m tests.image

bench: bench-metering bench-launch bench-eager bench-latency bench-planner bench-giants bench-calibration bench-training bench-dry_run bench-scheduling bench-fleet bench-listing bench-pages bench-history bench-viewer bench-pictures bench-long_context ## every benchmark, as ratios

load: bench-load ## submits, lists and sockets at once on a served board of 10,000 jobs; fails where one is lost

bench-rivals: $(VENV)/.dev ## compare with the train.py of other projects: RIVALS="--nanogpt PATH --picotron PATH", their checkouts
	$(BIN)/python -m benchmarks.rivals $(RIVALS)

bench-published: $(VENV)/.dev ## compare the planner with published measurements; ROWS=file.csv
	$(BIN)/python -m benchmarks.published --rows $(ROWS)

gpu: $(VENV)/.dev ## a machine with GPUs: compare meter, parity, memory, rates, and MFU with the plan; GPU="--docs", "--small"
	$(BIN)/python -m benchmarks.gpu $(GPU)

bench-%: $(VENV)/.dev
	$(BIN)/python -m benchmarks.$*

clean: ## remove the environment and all state (asks nothing: jobs and logs under var/ go too)
	rm -rf $(VENV) var build dist docs/site *.egg-info .mypy_cache .ruff_cache .pytest_cache
