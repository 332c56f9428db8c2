# Everything runs in .venv, which `make setup` makes. PYTHON decides which Python it is made of.
PYTHON ?= python3
MODEL ?= demo
BIN := .venv/bin
# Tests start hundreds of Python processes, each of which would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE
# Processes that run tests or check types at the same time.
WORKERS ?= 2
# Three for tests, which wait for a quarter of their time or more.
unit: WORKERS := 3
integration: WORKERS := 3
PYTEST = $(BIN)/pytest --numprocesses $(WORKERS)
# Tests of the server that also run through front ends in processes of their own.
THROUGH_FRONT_ENDS := generation/test_generate generation/test_session subscriptions/test_subscribe \
	delivery/test_slow_readers requests/test_trouble

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo serve test lint types unit integration soak breaking generate format lock clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: ## Make .venv, or do nothing if it is current
	@$(PYTHON) tools/setup

demo: setup ## Steering, capture and the picture of a causal trace, on the bundled model
	$(BIN)/rheostat demo

serve: setup ## Serve the bundled model, or MODEL=...
	$(BIN)/rheostat serve $(MODEL)

test: lint types unit integration ## All that CI runs; tests/README.md says how long each part takes

lint: setup breaking ## ruff, buf, and whether the generated code is current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/python tools/generate --check

breaking: setup ## Whether the protos still keep the promises of the main branch's
	$(BIN)/python tools/breaking

types: setup ## mypy --strict on all packages
	$(BIN)/mypy --num-workers $(WORKERS)

unit: setup ## Tests without an engine
	$(PYTEST) --dist worksteal tests/unit
	RHEOSTAT_TEST_FRONT_ENDS=1 $(PYTEST) --dist worksteal $(THROUGH_FRONT_ENDS:%=tests/unit/server/%.py)

integration: setup ## Tests on the real vLLM engine
	$(PYTEST) --dist loadgroup --no-loadscope-reorder tests/integration

soak: setup ## Hours: hostile calls, rows compared with a replay, front ends killed, large grids
	RHEOSTAT_TEST_ROUNDS=100 $(BIN)/pytest tests/unit/server/front_ends/test_front_ends.py --timeout 600
	RHEOSTAT_TEST_FRONT_ENDS=2 $(PYTEST) --dist worksteal tests/unit/server
	RHEOSTAT_TEST_EFFORT=10 $(PYTEST) --dist worksteal tests/unit -m "hypothesis or at_length"
	RHEOSTAT_TEST_EFFORT=10 $(PYTEST) --dist loadgroup --no-loadscope-reorder tests/integration -m "hypothesis or at_length"
	$(BIN)/rheostat bench soak --out build/soak
	$(BIN)/rheostat bench soak --out build/soak --calls 2000 --front-ends 2 --name soak-front-ends
	$(BIN)/python -m tests.soak.replay --seeds 12
	$(BIN)/python -m tests.soak.replay --seeds 4 --compiled
	$(BIN)/python -m tests.soak.tracing --calls 20000
	$(BIN)/python -m tests.soak.tracing --calls 2000 --front-ends 2
	$(BIN)/python -m tests.soak.watching --cuts 1000
	$(BIN)/python -m tests.soak.watching --cuts 1000 --client aio
	$(BIN)/python -m tests.soak.monitoring --calls 20000
	$(BIN)/python -m tests.soak.stops --trials 10000
	$(BIN)/python -m tests.soak.stops --trials 5000 --async-scheduling

generate: ## Make the generated code from proto/
	$(PYTHON) tools/generate

format: setup ## Format Python and protos, and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write

lock: ## Write requirements/ci.txt anew, from the newest versions that work
	$(PYTHON) tools/setup --lock

clean: ## Remove what is not in git: .venv, caches, builds
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find bench clients engine_ext server tests tools -name __pycache__ -prune -exec rm -rf {} +
