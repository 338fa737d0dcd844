# Everything a developer or a user runs. Needs Python >= 3.11, make and git; the rest is put into .venv by itself.
.DEFAULT_GOAL := help
SHELL := /bin/bash
MAKEFLAGS += --no-builtin-rules --no-print-directory
# Tests start thousands of processes: without compiled modules each takes a fifth of a second longer.
unexport PYTHONDONTWRITEBYTECODE

# The Python that makes the environments: the first of these that is new enough. `make PYTHON=/path/to/python …` overrules.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3 python; do \
  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)
# Generates code of protobuf 6.31.1, the oldest that pyproject.toml allows; every later grpcio and protobuf 7 run it.
GRPCIO_TOOLS := 1.76.0

BIN := .venv/bin
DEMO := .venv/.demo-installed
DEV := .venv/.dev-installed
BENCH := .venv/.bench-installed
FUZZ := .venv/.fuzz-installed
FRAMEWORKS := .venv-frameworks/.installed
RAY := .venv-ray/.installed
PROTO := .venv-proto/.installed
PROTOS := $(shell find protos -name '*.proto' | sort)
PIP := -m pip install --quiet --no-input --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest

.PHONY: help install demo test-fast test test-benchmarks test-compose test-wheel test-lowest test-frameworks test-engines coverage simulate bench bench-peers bench-torch bench-outer mutate weight fuzz chaos check fix proto clean \
  check-lint check-format check-types check-protos check-stubs check-imports check-docs check-breaking check-changes docs docs-serve pictures fix-lint fix-format fix-protos fix-stubs fix-docs

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 26

install: $(DEV)  ## create the environment .venv with the package installed editable

demo: $(DEMO)  ## train on handwritten digits with 2 parameter servers, a chief and 3 workers; ARGS="…" are passed on
	@$(BIN)/lockstep demo $(ARGS)

# Files in memory.
test-fast: $(DEV)  ## run tests/unit and tests/repo: no network, no processes; under 20 seconds
	@PYTEST_DEBUG_TEMPROOT=$(wildcard /dev/shm) $(PYTEST) tests/unit tests/repo -m "not slow" -n 2 --dist worksteal $(ARGS)

# A step is measured in `make test` too.
test-benchmarks: $(DEV)  ## test every benchmark at a small size, with real processes
	@$(PYTEST) tests/processes/benchmarks -m "benchmark or not benchmark" -n 3 --dist worksteal $(ARGS)

# What docker-compose.yml promises, on a real engine. DOCKER_BUILD_FLAGS='--network host' where containers have no network during a build.
test-compose: $(DEV)  ## test the image, and docker-compose.yml with a killed parameter server; without a container engine, says so
	@$(BIN)/python -m tests.processes.deploy.compose_run

# In an environment that has only the wheel, and in a directory that has no checkout.
test-wheel: $(DEV)  ## build the wheel, install it in an empty environment, and run it
	@rm -rf dist .venv-wheel && $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist . && $(PYTHON) -m venv .venv-wheel
	@.venv-wheel/bin/python $(PIP) dist/*.whl && cp examples/linear_regression.py .venv-wheel/train.py
	@cd .venv-wheel && bin/lockstep --version && bin/lockstep up --ps 2 --workers 2 --run-dir run -- python train.py

# Each dependency in the oldest version that pyproject.toml promises to work with.
test-lowest: $(DEV)  ## run all tests with the oldest supported dependencies, in .venv-lowest
	@rm -rf .venv-lowest && $(PYTHON) -m venv .venv-lowest && .venv-lowest/bin/python $(PIP) --upgrade 'pip>=25.1'
	@$(BIN)/python -m tests.repo.lowest >.venv-lowest/floors.txt
	@.venv-lowest/bin/python $(PIP) --constraint .venv-lowest/floors.txt --editable '.[demo,certs,estimator,bfloat16,remote]' --group dev
	@.venv-lowest/bin/python -m pytest -n 3 --dist worksteal $(ARGS)

test-frameworks: $(FRAMEWORKS)  ## run the tests with PyTorch, JAX, Keras, scikit-learn and dask, in .venv-frameworks; 3 to 9 GB
	@OMP_NUM_THREADS=1 .venv-frameworks/bin/python -m pytest tests/frameworks tests/contract/session/test_documented_programs.py \
	  tests/contract/session/test_estimator.py tests/contract/session/test_estimator_cluster.py -n 2 --dist worksteal $(ARGS)

test-engines: $(DEV) $(if $(filter torchrun,$(ENGINE)),$(FRAMEWORKS)) $(if $(filter ray,$(ENGINE)),$(RAY))  ## run a cluster in a real engine on hosts of its own, as root: ENGINE=slurm (default), ssh, torchrun, mpi, ray, kubernetes
	@$(if $(filter ray,$(ENGINE)),.venv-ray/bin/python -m pytest,$(PYTEST)) -s \
	  -m "engine and $(or $(ENGINE),slurm)" tests/engines $(ARGS)

coverage: $(DEV)  ## measure which lines and branches the tests reach, subprocesses included
	@$(BIN)/coverage erase && $(BIN)/coverage run -m pytest -n 3 --dist worksteal $(ARGS); found=$$?; \
	  $(BIN)/coverage combine --quiet; $(BIN)/coverage report; exit $$found

# Four at once on two processors: tests of real processes wait for a third of their time, and a fifth worker costs more than it saves.
test: $(DEV)  ## run all tests but chaos and benchmarks; ARGS="-k framing" are passed to pytest
	@$(PYTEST) -n 4 --dist worksteal $(ARGS)

# The second line are floods and the third one is the soak, which need the machine for themselves. SOAK=0 leaves the soak out, and with
# FLOODS=all every flood meets every role, which takes 10 minutes more.
SOAK ?= 600
chaos: $(DEV)  ## kill, stop, disconnect and flood real processes, shift their clocks, then 10 minutes of random faults; under 20 minutes
	@rm -f lockstep-runs/chaos/recovery.jsonl
	@$(PYTEST) tests/chaos -m "chaos or quick" -n 2 --ignore tests/chaos/test_soak.py --ignore tests/chaos/test_floods.py $(ARGS); found=$$?; \
	  $(PYTEST) tests/chaos/test_floods.py -m chaos -n 0 -s $(ARGS) || found=1; \
	  if [ "$(SOAK)" != 0 ]; then CHAOS_SOAK_S=$(SOAK) $(PYTEST) tests/chaos/test_soak.py -m chaos -n 0 -s $(ARGS) || found=1; fi; \
	  $(BIN)/python -m tests.chaos.recovery_table; exit $$found

# What it finds stays in lockstep-runs/fuzz/, and the next run begins with it. `make test` runs the same targets without the fuzzer.
fuzz: $(FUZZ)  ## fuzz messages and checkpoint files, SECONDS=10 for each target
	@set -o pipefail; mkdir -p lockstep-runs/fuzz/found; for target in frames tensor_file manifest; do echo "fuzzing $$target"; \
	  $(BIN)/python -m tests.fuzz $$target lockstep-runs/fuzz/$$target -max_total_time=$(or $(SECONDS),10) -max_len=4096 -timeout=10 \
	  -verbosity=0 -artifact_prefix=lockstep-runs/fuzz/found/ $(ARGS) 2>&1 \
	  | { grep -vE '^INFO:|^WARNING: Failed to find|ictionary\.|# Uses' || true; } || exit 1; done; echo "nothing found"

# Chief, servers and workers under faults, in simulated time. What breaks a promise is printed with its seed, and shrunk by --seed N.
SEEDS ?= 20000
simulate: $(DEV)  ## check the promises of docs/explanation/reliability.md on 20,000 simulated clusters; SEEDS=1000, ARGS="--seed 17" shows one
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(ARGS)

# The second path and later ones are layers of tests: MODULE="chief/core/report.py tests/unit/chief tests/wire/chief".
mutate: $(DEV)  ## break MODULE=chief/core/report.py in 40 small ways, and name those that no test notices; 2 to 8 minutes
	@$(BIN)/python -m tests.mutate $(MODULE) $(ARGS)

weight:  ## count lines of code by place, and words of documents; ARGS=REF compares with that commit
	@$(PYTHON) -m tests.repo.weight $(ARGS)

# `make bench` and `make bench-peers` keep their figures in lockstep-runs/ as JSON, and draw them there.
bench: $(BENCH)  ## measure a step at six sizes over every transport, 7 minutes; ARGS="apply …" runs another of `python -m benchmarks list`
	@mkdir -p lockstep-runs && $(BIN)/python -m benchmarks run $(or $(ARGS),table --plot lockstep-runs/bench.png)

bench-peers: $(BENCH)  ## measure steps beside TensorFlow, torch (gloo) and MXNet, which it installs, 15 minutes; ARGS="--sizes 4KiB/4 --repeat 1"
	@mkdir -p lockstep-runs && $(BIN)/python -m benchmarks run peers --plot lockstep-runs/peers.png $(ARGS)

bench-torch: $(FRAMEWORKS)  ## measure PyTorch models over lockstep.torch beside DistributedDataParallel (gloo), in .venv-frameworks; ARGS="--models mlp-64MiB"
	@OMP_NUM_THREADS=1 .venv-frameworks/bin/python -m benchmarks run torch $(ARGS)

bench-outer: $(FRAMEWORKS)  ## measure outer steps of a PyTorch model beside DistributedDataParallel (gloo), in .venv-frameworks; ARGS="--seeds 0"
	@OMP_NUM_THREADS=1 .venv-frameworks/bin/python -m benchmarks run outer $(ARGS)

check-changes: $(DEV) $(PROTO)  ## make each made-up change of docs/contributing/design.md in a copy of the tree, and try it; a minute
	@$(BIN)/python -m tests.repo.changes

check: check-lint check-format check-types check-protos check-stubs check-imports check-docs  ## run every static check

fix: fix-lint fix-format fix-protos fix-stubs fix-docs  ## fix what can be fixed automatically

check-lint: $(DEV)  ## check ruff's rules
	@$(BIN)/ruff check .

fix-lint: $(DEV)  ## apply ruff's automatic fixes
	@$(BIN)/ruff check --fix .

check-format: $(DEV)  ## check the format of the code
	@$(BIN)/ruff format --check --quiet . || { echo "not formatted: run 'make fix-format'" >&2; $(BIN)/ruff format --diff . 2>&1 | head -40; exit 1; }

fix-format: $(DEV)  ## format the code
	@$(BIN)/ruff format .

check-types: $(DEV)  ## check types: mypy, strict
	@$(BIN)/mypy

check-protos: $(DEV)  ## check buf's rules and format
	@$(BIN)/buf lint
	@$(BIN)/buf format --diff --exit-code || { echo "protos are not formatted: run 'make fix-protos'" >&2; exit 1; }

fix-protos: $(DEV)  ## format the protos
	@$(BIN)/buf format --write

check-stubs: $(PROTO) $(DEV)  ## check that the committed stubs and coders match the protos and the pairs
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT \
	  && .venv-proto/bin/python -m grpc_tools.protoc -I protos --python_out="$$out" --pyi_out="$$out" $(PROTOS) \
	  && { diff -r -x __init__.py -x __pycache__ "$$out/ps_protocol/v1" ps_protocol/v1 \
	  || { echo "ps_protocol/v1 is not what protos/ generates: run 'make proto'" >&2; exit 1; }; }
	@$(BIN)/python -m ps_protocol.wire.generator --check

fix-stubs: proto

proto: $(PROTO) $(DEV)  ## generate ps_protocol/v1 from protos/, and ps_protocol/wire/coders.py from its pairs
	@rm -f ps_protocol/v1/*_pb2*.py*
	@.venv-proto/bin/python -m grpc_tools.protoc -I protos --python_out=. --pyi_out=. $(PROTOS)
	@$(BIN)/python -m ps_protocol.wire.generator
	@echo "generated ps_protocol/v1 with grpcio-tools $(GRPCIO_TOOLS), and ps_protocol/wire/coders.py"

check-imports: $(DEV)  ## check which folder imports which
	@out=$$($(BIN)/lint-imports --no-cache 2>&1) || { echo "$$out"; exit 1; }

# Material asks to try its successor on every run; the answer is no until that builds our pages.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
# Without --quiet, by which --strict sees no warning.
BUILD_DOCS = said=$$($(MKDOCS) build --strict --site-dir $(1) 2>&1) || { grep -vE '^(INFO|  - )' <<< "$$said"; exit 1; }

check-docs: $(DEV)  ## build the documentation without a warning, and check its tables that are made
	@$(BIN)/python -m tests.repo.made_docs
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && $(call BUILD_DOCS,"$$out")

fix-docs: $(DEV)  ## write the tables of flags and faults in the documentation
	@$(BIN)/python -m tests.repo.made_docs --write

docs: fix-docs  ## build the documentation as a site, in site/
	@$(call BUILD_DOCS,site) && echo "open site/index.html"

# Real clusters in a real Chromium (Debian's package chromium). Look at them before you commit them.
pictures: $(BENCH)  ## take the pictures of the page for the documentation again; 4 minutes
	@$(BIN)/python -m tests.processes.page.pictures $(ARGS)

docs-serve: $(DEV)  ## serve the documentation, and rebuild it when a page changes
	@$(MKDOCS) serve --quiet

# Against the newest release, or against AGAINST=<ref>.
check-breaking: $(DEV)  ## check that the protos are compatible with the last release
	@against="$(AGAINST)"; against=$${against:-$$(git describe --tags --abbrev=0 2>/dev/null)}; \
	  if [ -z "$$against" ]; then echo "no release to compare with; pass AGAINST=<git ref>"; \
	  else $(BIN)/buf breaking --against ".git#ref=$$against"; fi

clean:  ## remove environments, caches and files of demos
	@rm -rf .venv .venv-proto .venv-peers .venv-wheel .venv-lowest .venv-frameworks .venv-ray .coverage* .mypy_cache .ruff_cache .hypothesis .pytest_cache build dist site *.egg-info lockstep-runs
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# make_venv DIRECTORY
define make_venv
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; install one, or name it: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(1)/bin/python || { echo "making $(1) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(1); } \
	  || { rm -rf $(1); echo "$(PYTHON) cannot make environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
endef

$(DEMO): pyproject.toml
	$(call make_venv,.venv)
	@echo "installing Lockstep and what the demo needs into .venv"
	@$(BIN)/python $(PIP) --editable '.[demo]' && touch $@

$(DEV): $(DEMO)
	@echo "installing the tools of development into .venv"
	@$(BIN)/python -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (25, 1))' || $(BIN)/python $(PIP) --upgrade 'pip>=25.1'
	@$(BIN)/python $(PIP) --editable '.[demo]' --group dev && touch $@

$(BENCH): $(DEV)
	@echo "installing what draws plots into .venv"
	@$(BIN)/python $(PIP) --editable '.[demo,bench]' --group dev && touch $@

$(FUZZ): $(DEV)
	@echo "installing the fuzzer into .venv"
	@$(BIN)/python $(PIP) --editable '.[demo]' --group dev --group fuzz && touch $@

# One version of PyTorch, so that a failure or a figure is never that of a new release. Its own index has builds without CUDA. Where it does not answer, or with TORCH_INDEX=, PyTorch comes from PyPI, with 5 GB of CUDA.
TORCH ?= torch==2.13.*
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ANSWERS := import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=20)
$(FRAMEWORKS): pyproject.toml
	$(call make_venv,.venv-frameworks)
	@echo "installing PyTorch, JAX and other frameworks into .venv-frameworks"
	@.venv-frameworks/bin/python $(PIP) --upgrade 'pip>=25.1'
	@index=$(TORCH_INDEX); [ -z "$$index" ] || .venv-frameworks/bin/python -c '$(ANSWERS)' "$$index/" 2>/dev/null \
	  || { echo "$$index does not answer: PyTorch comes from PyPI, with CUDA"; index=; }; \
	  .venv-frameworks/bin/python $(PIP) --no-deps $${index:+--extra-index-url=$$index} '$(TORCH)'
	@.venv-frameworks/bin/python $(PIP) --editable '.[demo,bench,certs,estimator,bfloat16,remote,parquet,jax,keras,torch]' --group frameworks && touch $@

$(RAY): pyproject.toml
	$(call make_venv,.venv-ray)
	@echo "installing Ray into .venv-ray"
	@.venv-ray/bin/python $(PIP) --upgrade 'pip>=25.1'
	@.venv-ray/bin/python $(PIP) --editable '.[demo,ray]' 'ray[train]' --group dev && touch $@

$(PROTO): Makefile
	$(call make_venv,.venv-proto)
	@echo "installing grpcio-tools $(GRPCIO_TOOLS) into .venv-proto"
	@.venv-proto/bin/python $(PIP) grpcio-tools==$(GRPCIO_TOOLS) && touch $@
