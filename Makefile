# Every target prepares what it needs. `make test` on a fresh clone is the whole story.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: venv lint format test test-slow test-peers bench quickstart proto clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(STAMP)
	sh tests/store/install_postgres.sh
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow"

test-peers: $(STAMP)
	$(BIN)/python tests/peers/run.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache

# An old protoc on purpose: generated code runs on its own protobuf version and every later one.
PROTO_VENV := build/protoc
proto:
	test -x $(PROTO_VENV)/bin/python || $(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/pip install -q grpcio-tools==1.71.0 setuptools
	$(PROTO_VENV)/bin/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src src/tinkex/wire/tinker_public.proto
