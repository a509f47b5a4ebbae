# Two commands need nothing but Python 3.11, pip, venv and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick lint shell bench docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## ?/  make \1	/' | expand -t 20

# Installed once; again only when what is to be installed changes.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Treadle needs Python 3.11 or newer; set PYTHON=…" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt $(RUN)/python -m pip install -q -e '.[dev]'
	@touch $@

$(VENV)/installed-bench: $(VENV)/installed
	PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt $(RUN)/python -m pip install -q -e '.[bench]'
	@touch $@

demo: $(VENV)/installed ## show Treadle on a naive shop, in less than a minute
	$(RUN)/treadle demo

test: lint ## check everything: lint, types, tests against a real server
	$(RUN)/python -m pytest -n 2

test-quick: $(VENV)/installed ## what needs no server, and one path through each pattern
	$(RUN)/python -m pytest -n 2 -m "quick or not (server or heavy)"

lint: $(VENV)/installed ## ruff and mypy
	$(RUN)/ruff check
	$(RUN)/ruff format --check
	$(RUN)/mypy

shell: $(VENV)/installed ## write the blocking store from the asyncio one
	$(RUN)/python tools/blocking.py

bench: $(VENV)/installed-bench ## measure; write benchmarks/RESULTS.md and the table of docs/trees.md
	$(RUN)/python -m benchmarks
	$(RUN)/python -m benchmarks.trees benchmarks/RESULTS.json

docs: $(VENV)/installed ## build the site into build/site; a broken link is an error
	$(RUN)/python docs/write_cli_reference.py
	$(RUN)/python docs/draw_rooms.py
	$(RUN)/python -m sphinx -q -W --keep-going -b html -c docs -d build/doctrees . build/site
	@echo build/site/index.html

clean: ## remove what the targets made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis treadle-demo.html
