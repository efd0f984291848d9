# Two commands do everything: `make serve` and `make test`. `make help` lists the rest.

PYTHON ?= python3
MODEL ?= smollm2-135m
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
# Index URL of another PyTorch build; PyTorch's install page names them.
TORCH_INDEX ?=

BIN := .venv/bin
BOOTSTRAP = $(PYTHON) tools/bootstrap.py --torch-index "$(TORCH_INDEX)"
PYTEST = $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help serve setup native test test-long check format clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 20
	@echo "  variables: MODEL=$(MODEL) HOST=$(HOST) PORT=$(PORT) ARGS=... TORCH_INDEX=... PYTHON=$(PYTHON)"

serve: ## Install what is needed, fetch the model, serve it
	@$(BOOTSTRAP) serve
	@exec $(BIN)/headrace serve "$(MODEL)" --host "$(HOST)" --port "$(PORT)" $(ARGS)

setup: ## Install what is needed and stop
	@$(BOOTSTRAP) serve

native: ## Rebuild the CPU kernels into the source tree after a change in csrc
	@$(BOOTSTRAP) test
	@$(BIN)/cmake -S . -B build/native -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" -DHEADRACE_INPLACE=ON
	@$(BIN)/cmake --build build/native --parallel

test: check ## Check format, lint, types, imports and sizes, then run the tests
	@$(PYTEST) -m "not long"

test-long: ## Run the tests that take minutes
	@$(BOOTSTRAP) test
	@$(PYTEST) -m long

check: ## Check format, lint, types, imports and sizes
	@$(BOOTSTRAP) test
	@echo "== format" && $(BIN)/ruff format --check .
	@echo "== lint" && $(BIN)/ruff check .
	@echo "== types" && $(BIN)/mypy
	@echo "== imports" && $(BIN)/lint-imports --no-logo
	@echo "== sizes" && $(BIN)/python tools/sizes.py

format: ## Rewrite the files in the house format
	@$(BOOTSTRAP) test
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

clean: ## Remove what was built and cached in this folder, .venv included
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
