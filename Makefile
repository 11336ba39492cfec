# Every target makes .venv and installs what it needs by itself, from python3 alone, and does nothing twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench stress docs clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(STAMP) ## Make .venv with everything in it

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "paclm needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make setup PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing paclm and its pinned dependencies (about 2 GB, two or three minutes, silent until done) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' 2> $(VENV)/install.log \
		|| { cat $(VENV)/install.log; echo "pip could not install paclm: see above. It needs the network, or an index that PIP_INDEX_URL names."; exit 1; }
	@touch $@

demo: $(STAMP) ## Run the main job on what the package brings along
	@$(BIN)/paclm demo demo-workspace

test: lint $(STAMP) ## Lint, types and all tests
	@$(BIN)/python tests/server/browser.py
	@$(BIN)/python tests/postgres.py
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: $(STAMP) ## Style and types
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary

bench: $(STAMP) ## Measure speed against named alternatives, in one run
	@for file in bench/bench_*.py; do $(BIN)/python $$file || exit 1; done

stress: $(STAMP) ## The long tests
	@$(BIN)/python tests/postgres.py
	@$(BIN)/python -m pytest -m stress -o addopts="-q --strict-markers --import-mode=importlib" || [ $$? -eq 5 ]

docs: $(STAMP) ## Build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open site/index.html. With a search box: $(BIN)/python -m http.server --directory site"

clean: ## Remove what the other targets made
	@rm -rf $(VENV) site demo-workspace .mypy_cache .ruff_cache .pytest_cache .hypothesis
