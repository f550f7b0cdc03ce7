# Everything a person or CI does with this repository. `make` alone lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv train test test-all lint format docs bench clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## Make the virtual environment with all that development needs.

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

train: venv ## Train the example on real text, report on it, and let it write some text.
	$(BIN)/phalanx train examples/gpt-python.yaml --run runs/gpt-python
	$(BIN)/phalanx report runs/gpt-python --html runs/gpt-python/report.html
	$(BIN)/phalanx generate runs/gpt-python

test: venv ## Run the tests that take less than 15 minutes together.
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile tests/unit tests/browser tests/world
	$(BIN)/python -m pytest -m "not slow" tests/chaos

test-all: venv ## Run all tests, also those that take minutes each.
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/browser tests/world
	$(BIN)/python -m pytest tests/chaos

lint: venv ## Check format, lint, types and layers.
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## Format the code and mend what ruff can mend.
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: venv ## Make the reference pages that come from the code.
	$(BIN)/phalanx recipe schema --markdown > docs/recipe.md

bench: venv ## Run the benchmarks against their peers; tables go to docs/results.
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	for script in engine_overhead data checkpoint exact; do \
		$(BIN)/python benchmarks/$$script.py --out docs/results/$$script.md || exit 1; \
	done

clean: ## Remove what was built; the runs in runs/ and the virtual environment stay.
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
