# Nothing but Python (3.11 to 3.13), git and make is needed: each target makes the environment it runs in.

VENV   ?= .venv
EXTRAS ?= dev
ARGS   ?=
BENCH  ?= all

# The first interpreter that really runs (a pyenv shim may only say "command not found") and has venv.
USABLE  = import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
            if "$$p" -c "$(USABLE)" >/dev/null 2>&1; then echo "$$p"; break; fi; done)

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test bench lint docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  ARGS="..." goes to the script or to pytest; PYTHON=... chooses the interpreter of a new environment'

$(STAMP): pyproject.toml
	@"$(PYTHON)" -c '$(USABLE)' || { echo 'need Python 3.11, 3.12 or 3.13 with venv; say which: make PYTHON=/path/to/python' >&2; exit 1; }
	@"$(BIN)/python" -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear "$(VENV)"
	@"$(BIN)/python" -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP) ## train a small model on images cut over simulated devices
	$(BIN)/python examples/train_fundus.py $(ARGS)

test: $(STAMP) ## all tests but the slow ones
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

bench: $(STAMP) ## all benchmarks, takes long (BENCH=ring_conv, reshard, optimizer, partition, models, scaling, checkpoints, peers: that one)
	$(BIN)/python benchmarks/$(BENCH).py $(ARGS)
ifneq ($(BENCH),all)
	$(BIN)/python benchmarks/all.py --table
endif

lint: $(STAMP) ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# Its own packages, on top of whatever EXTRAS the environment has.
docs: $(STAMP) ## the documentation, into site/: strict, so that a dead link fails
	@"$(BIN)/python" -m pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

clean: ## remove environments, caches and build results
	rm -rf .venv .venv312 dist build site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
