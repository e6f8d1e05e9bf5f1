# make run    everything: set-up, all stages, the table          make test   all tests
# make ui     the Prefect server of this project                 make lint   ruff and pyright
# make clean  what set-up and tools made; never data/ or the cache of results

PYTHON ?= python3
BIN    := .venv/bin

.PHONY: run test lint ui clean setup
.DEFAULT_GOAL := run

run: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/dvc repro
	@$(BIN)/python -m pipeline table

test: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright

ui: setup
	@$(BIN)/python -m pipeline ui

setup: .venv/.installed
	@# Unpacked from an archive there is no git repository, and DVC wants to be told so.
	@if git rev-parse --git-dir >/dev/null 2>&1; then \
	  if grep -qs no_scm .dvc/config.local; then $(BIN)/dvc config --local --unset core.no_scm; fi; \
	elif ! grep -qs no_scm .dvc/config.local; then \
	  $(BIN)/dvc config --local core.no_scm true; \
	fi

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo "Installing the pinned packages into .venv (a few minutes, once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv .prefect .pytest_cache .ruff_cache .hypothesis *.egg-info
	find pipeline stages tests -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "Kept: data/ and .dvc/cache (results). To remove results too: rm -rf .dvc/cache and what git ignores in data/"
