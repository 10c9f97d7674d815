# Every target prepares what it needs. `make test` on a fresh clone is the whole story.
SHELL := /bin/bash

# `make test PYTHON=3.12` (or python3.12, or a path): another Python, in a virtual environment of its
# own (.venv-3.12.1). The one that `python3` is has plain .venv.
PYTHON ?= python3
INTERPRETER := $(shell sh dev/find_python.sh '$(PYTHON)' $(firstword $(MAKECMDGOALS)))
ifeq ($(INTERPRETER),)
$(error no Python for this: see the lines above)
endif
version = $(shell "$(1)" -c 'import platform; print(platform.python_version())')
VERSION := $(call version,$(INTERPRETER))
VENV := $(if $(filter $(VERSION),$(call version,python3)),.venv,.venv-$(VERSION))
BIN := $(VENV)/bin
# What users of Tinkex need, and what its tests and docs need on top; of this Python, since `python3`
# may be another one tomorrow.
STAMP := $(VENV)/.installed-$(VERSION)
DEV_STAMP := $(VENV)/.installed-dev-$(VERSION)
# `make quickstart TORCH=cuda` (or cpu): that build of torch, whether or not a driver is here.
TORCH ?=

# Tests start hundreds of programs: without kept bytecode each compiles its modules again.
unexport PYTHONDONTWRITEBYTECODE

# A package index that is away for a moment fails nothing; tests that call pip inherit this.
export PIP_RETRIES ?= 10
export PIP_DEFAULT_TIMEOUT ?= 60
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: test-cluster venv lint format test fuzz test-quick test-pythons test-pythons-quick test-slow test-browser test-clients test-peers test-peers-quick test-frameworks system bench quickstart dist docs proto clean clean-cache

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt dev/environment.py
	"$(INTERPRETER)" dev/environment.py $(VENV) '.[local,gguf,hub]' $(if $(TORCH),--torch $(TORCH))
	touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

lint: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(DEV_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

quickstart: $(STAMP)
	$(BIN)/tinkex quickstart

# Tests write into this clone, the cache folder ($TINKEX_CACHE, ~/.cache/tinkex) and the system's folder
# for temporary files. `SYSTEM=1` also installs Debian packages, which the browser tests need.
SYSTEM ?=
ifneq ($(filter-out 0 no,$(SYSTEM)),)
SYSTEM_PACKAGES := system
endif
system:
	sh tests/browser/install_chromium.sh

# Each process starts with its share of the files, so that what a file shares (a server, a model) is
# made once, and takes tests from the others when it is done. Three on two cores: many tests wait.
TOGETHER := -n 3 --dist worksteal
test: $(DEV_STAMP) $(SYSTEM_PACKAGES)
	$(BIN)/python -m pytest $(TOGETHER) -m "not slow and not gpu and not cluster and not peers"

# Damaged requests to every endpoint, so many to each.
COUNT ?= 5000
fuzz: $(DEV_STAMP)
	$(BIN)/python tests/security/fuzz.py --count $(COUNT)

# What another version of Python can break: imports, types, wire, command line, client, server,
# Triton's interpreter and a training step of the real engine.
QUICK := tests/contracts tests/types tests/wire tests/chat tests/cli/test_app.py \
  tests/cli/test_listings.py tests/client/test_clients.py tests/client/test_calling_styles.py \
  tests/client/test_sampling.py tests/server/test_sessions.py tests/server/test_bad_input.py \
  tests/server/test_samples.py tests/server/console tests/engine/test_trainer.py \
  tests/engine/test_kernels.py
test-quick: $(DEV_STAMP)
	$(BIN)/python -m pytest $(TOGETHER) -m "not slow and not gpu and not cluster and not peers" $(QUICK)

# On every Python from 3.11 to 3.14 that this machine has; those it has not are named.
test-pythons:
	bash dev/test_pythons.sh test

# The same for CI, where `make test` has run on $(VERSION) already.
test-pythons-quick:
	bash dev/test_pythons.sh test-quick --without $(VERSION)

test-slow: $(DEV_STAMP)
	$(BIN)/python -m pytest -m "slow"

# The console in Debian's Chromium; TINKEX_SCREENSHOTS=1 makes the pictures of docs/console.md.
test-browser: $(DEV_STAMP) $(SYSTEM_PACKAGES)
	$(BIN)/python -m pytest tests/browser

# Clients of the OpenAI and Anthropic APIs, as released.
test-clients: $(DEV_STAMP)
	$(BIN)/python -m pytest -m "slow or not slow" tests/clients

# Ray is large, so only these tests install it.
test-cluster: $(DEV_STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[cluster]'
	$(BIN)/python -m pytest -m cluster tests/cluster

# Foreign programs against our server: the oldest and the newest official SDK, openai, anthropic. Each is
# installed once, into an environment in the cache folder.
test-peers-quick: $(DEV_STAMP) $(SYSTEM_PACKAGES)
	$(BIN)/python -m pytest $(TOGETHER) -m "peers and not slow and not gpu and not cluster"

# The same, then seven official SDKs; prints the tables of docs/peers.md.
test-peers: test-peers-quick
	$(BIN)/python tests/peers/run.py

# Frameworks that speak Tinker against our server, our client against another server; an hour.
test-frameworks: $(DEV_STAMP)
	$(BIN)/python tests/frameworks/run.py

# Every table of docs/benchmarks.md, except the GPU's where there is none. Exits 1 below a bar.
bench: $(DEV_STAMP)
	status=0; for name in wire client server train memory sample openai abuse pool console teacher; do \
	  $(BIN)/python benchmarks/$$name.py --write || status=1; done; \
	if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	  $(BIN)/python benchmarks/gpu.py --write || status=1; \
	  $(BIN)/python benchmarks/gpu_server.py --write || status=1; \
	else echo "no CUDA device: gpu.py and gpu_server.py were not run" >&2; fi; exit $$status

# All pages as a site in build/site, with search that works offline; a broken link fails.
docs: $(DEV_STAMP)
	$(BIN)/python dev/reference.py
	PYTHONPATH=src NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

# Wheel and sdist in dist/, each tried in an empty environment. Needs no .venv.
dist:
	bash dev/dist.sh "$(INTERPRETER)"

# What tests and the default model left outside the clone, each folder named with its size.
clean-cache:
	sh dev/clean_cache.sh

clean:
	rm -rf .venv .venv-3.* build dist .mypy_cache .pytest_cache .ruff_cache

# An old protoc on purpose: generated code runs on its own protobuf version and every later one.
PROTO_VENV := build/protoc
proto:
	test -x $(PROTO_VENV)/bin/python || "$(INTERPRETER)" -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/pip install -q grpcio-tools==1.71.0 setuptools
	$(PROTO_VENV)/bin/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src src/tinkex/wire/tinker_public.proto
