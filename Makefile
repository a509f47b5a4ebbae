# Two commands need nothing but Python 3.11, pip, venv and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-all test-pairs test-of test-servers fuzz lint mypy pyright shell hashes bench measure torture docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## ?/  make \1	/' | expand -t 20

# Installed once; again only when what is to be installed changes.
define install
	@$(PYTHON) -c 'import sys; sys.exit("Treadle needs Python 3.11 or newer; set PYTHON=…" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(RUN)/python -m pip install -q --require-hashes --no-deps -r $(1)
	PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt $(RUN)/python -m pip install -q -e '.[$(2)]'
endef

# What the tests need is all that the demo needs, and more.
$(VENV)/installed: pyproject.toml constraints.txt requirements-dev.txt
	$(call install,requirements-dev.txt,dev)
	@touch $@ $(VENV)/installed-demo

comma := ,
$(VENV)/installed-demo: pyproject.toml constraints.txt requirements-demo.txt
	$(call install,requirements-demo.txt,cli$(comma)local)
	@touch $@

$(VENV)/installed-bench: $(VENV)/installed
	PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt $(RUN)/python -m pip install -q -e '.[bench]'
	@touch $@

demo: $(VENV)/installed-demo ## show Treadle on a naive shop, in about a minute
	$(RUN)/treadle demo

# Slow tests begin first, and a process that has none left takes over tests of another. Three processes,
# because each waits for its server part of the time.
PYTEST := $(RUN)/python -m pytest -n 3 --dist=worksteal --durations=15

test-quick: $(VENV)/installed ## what needs no server, and one path through each pattern: under 90 seconds
	$(PYTEST) -m "quick or not (server or heavy or all)"

test: lint ## lint, types, and tests on a real server
	$(PYTEST) --junitxml=build/tests.xml

test-all: lint ## both Stores, all pairs, all faults, all kills, mutants, MongoDB 6.0.27, three members, a browser, …: up to 60 minutes
	TREADLE_TIER=all TREADLE_STORES=both TREADLE_FAULTS=all TREADLE_PAIRS=most $(PYTEST) --junitxml=build/tests-all.xml
	$(MAKE) test-servers

test-pairs: $(VENV)/installed ## every pair of features in every mode; about an hour
	TREADLE_PAIRS=all $(PYTEST) tests/test_pairs.py

test-of: $(VENV)/installed ## the tests of one module: make test-of F=src/treadle/engine/lease.py
	@set -e; files=$$($(RUN)/python -m tests.kit.covers $(F)); $(RUN)/python -m pytest $$files

# One file per pattern, the worker and schedules, and crash points, on another server.
OTHER_SERVERS := 6.0.27
SMOKE := tests/test_every_pattern.py $(addprefix tests/patterns/,test_computed.py test_extended_reference.py \
	test_rollup.py test_subset.py test_polymorphic.py test_polymorphic_indexes.py tree/test_moves.py \
	bucket/test_stored.py bucket/test_time_series.py outlier/test_stored.py approximation/test_counting.py \
	schema_versioning/test_updates.py history/test_track.py) \
	$(addprefix tests/upkeep/,test_stream.py test_stream_documents.py test_schedule.py test_set_up.py test_migrate.py)

# An assignment fails where its command fails; "export X=$$(command)" would not.
test-servers: $(VENV)/installed ## a smoke set on MongoDB 6.0.27, which is downloaded once
	@set -e; for version in $(OTHER_SERVERS); do \
		echo "MongoDB $$version"; \
		mongod=$$($(RUN)/python -m tests.servers $$version); \
		export TREADLE_MONGOD="$$mongod" TREADLE_MONGOD_VERSION=$$version; \
		$(PYTEST) -m "not heavy" $(SMOKE); \
		$(PYTEST) tests/engine/test_crash_points.py -k test_a_fault_at_any_command; \
	done

fuzz: $(VENV)/installed ## random filters, models, buckets, names and cancellations, for ten minutes
	TREADLE_FUZZ_SECONDS=600 $(RUN)/python -m pytest tests/fuzz

lint: $(VENV)/installed ## ruff, mypy, and pyright for what users see
	$(RUN)/ruff check
	$(RUN)/ruff format --check
	$(MAKE) -j 2 mypy pyright

mypy: $(VENV)/installed
	$(RUN)/mypy
	$(RUN)/mypy --strict --explicit-package-bases examples tests/typed

pyright: $(VENV)/installed
	$(RUN)/pyright --project pyproject.toml

shell: $(VENV)/installed ## write the blocking store from the asyncio one
	$(RUN)/python tools/blocking.py

hashes: $(VENV)/installed ## write requirements-dev.txt and requirements-demo.txt anew, after a change of constraints.txt
	$(RUN)/python tools/hashes.py

bench: $(VENV)/installed-bench ## measure; write benchmarks/RESULTS.md and the table of docs/trees.md
	$(RUN)/python -m benchmarks
	$(RUN)/python -m benchmarks.trees benchmarks/RESULTS.json

measure: $(VENV)/installed ## size, complexity and walks of the package, beside their goals; written into docs/architecture.md
	$(RUN)/python tools/measure.py --write

FAILOVERS ?= 200
torture: $(VENV)/installed ## three servers on this machine, and 200 failovers under load (FAILOVERS=…)
	$(RUN)/python -m benchmarks.torture --failovers $(FAILOVERS) --report build/torture.txt

docs: $(VENV)/installed ## build the site into build/site; a broken link is an error
	$(RUN)/python docs/write_cli_reference.py
	$(RUN)/python docs/write_api_reference.py
	$(RUN)/python docs/draw_rooms.py
	$(RUN)/python tools/draw_terminal.py
	$(RUN)/python -m sphinx -q -W --keep-going -b html -c docs -d build/doctrees . build/site
	@echo build/site/index.html

clean: ## remove what the targets made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis treadle-demo.html
