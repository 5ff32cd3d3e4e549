# `make` alone lists what there is. Everything runs in .venv, which `make setup` makes.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format native clean

CONTEXT ?= 32768
DEVICES ?=
PYTHON := .venv/bin/python
C_FILES := $(wildcard native/*.[ch] native/tests/*.[ch])
TYPING := build/typing
export PATH := $(CURDIR)/.venv/bin:$(PATH)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install everything that is needed, once; again: what has changed
	@deploy/setup.sh

native: setup ## build the native engine anew where its sources have changed

demo: setup ## a long context with and without the pool (CONTEXT=tokens, DEVICES="dram:2GiB,...")
	@mkdir -p build
	$(PYTHON) -m bench.demo --context $(CONTEXT) --devices "$(DEVICES)" --json build/demo.json

test: lint ## lint, then the whole test suite
	$(PYTHON) -m pytest

# kvpool.connectors is put together at installation; mypy sees it as it will be.
lint: setup ## style, types and format, nothing changed
	ruff check .
	ruff format --check .
	@rm -rf $(TYPING) && mkdir -p $(TYPING)/kvpool
	@ln -s $(CURDIR)/kvpool/* $(CURDIR)/connectors $(TYPING)/kvpool && ln -s $(CURDIR)/bench $(TYPING)
	cd $(TYPING) && mypy --strict --config-file ../../pyproject.toml \
	  --cache-dir ../../.mypy_cache -p kvpool -p bench
	clang-format --dry-run -Werror $(C_FILES)

format: setup ## bring all sources into format
	ruff check --fix-only .
	ruff format .
	clang-format -i $(C_FILES)

clean: ## remove what was built, but for .venv
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
