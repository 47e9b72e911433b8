# Each target does all its own set-up in .venv, or in .venv-NAME with CONSTRAINTS=…/NAME.txt (docs/install.md).
#   make demo      train a small model on this machine and check the result
#   make test      run the tests of each part, and the most telling ones of whole runs
#   make test-all  run all tests but the long ones (CI does); test-failed: those that failed again, one at a time
#   make check     lint, format, types (CI does, too)
#   make docs      the documentation as a site, in build/site; mistakes in links are errors
#   make soak      long fault and stress runs, the widest products of layouts (not part of CI)
#   make nightly   make test with the newest and with the oldest versions (not part of CI)
#   make cuda-build  rehearse GPUs with a CUDA build of torch, 5 GB in .venv-cuda (not part of CI)

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := $(if $(filter constraints.txt,$(CONSTRAINTS)),.venv,.venv-$(basename $(notdir $(CONSTRAINTS))))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --instafail

.PHONY: setup demo test test-all test-failed check docs soak nightly nightly-newest nightly-floor cuda-build

setup: $(READY)

# A CPU-only build of torch is taken where there is no NVIDIA driver and an index has one.
$(READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; ok = (3, 11) <= v < (3, 14); sys.exit(None if ok else f"error: Python 3.11 to 3.13 is needed, {sys.executable} is {v.major}.{v.minor}\n  fix: make PYTHON=python3.12 $(or $(MAKECMDGOALS),setup)")'
	@set=$$(sed -n '1s/^# Python \(3\.[0-9]*\).*/\1/p' $(CONSTRAINTS)); $(PYTHON) -c "import sys; v = '.'.join(map(str, sys.version_info[:2])); sys.exit(f'error: the set $(CONSTRAINTS) is of Python $$set, {sys.executable} is {v}\n  fix: make PYTHON=python$$set CONSTRAINTS=$(CONSTRAINTS) $(or $(MAKECMDGOALS),setup)' if '$$set' not in ('', v) else None)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
	  torch=$$(grep '^torch==' $(CONSTRAINTS)); \
	  if command -v nvidia-smi >/dev/null; then $(BIN)/pip install -q "$$torch"; \
	  else $(BIN)/pip install -q "$$torch+cpu" 2>/dev/null || $(BIN)/pip install -q "$$torch"; fi; \
	fi
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[dev,docs,tensorboard,ray]'
	@touch $@

demo: setup
	@$(BIN)/python launch/demo.py

test: setup
	$(PYTEST) -m '(not slow or quick) and not gpu and not soak and not cuda_build'

test-all: setup
	$(PYTEST)

test-failed: setup
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy launch/*.py
	$(BIN)/python -m toolkit.recipe.docs --check

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

soak: setup
	$(BIN)/python -m pytest -m soak --timeout 3600

# Each part runs, whatever became of the others.
nightly:
	$(MAKE) -k nightly-newest nightly-floor

nightly-newest:
	$(MAKE) test PYTHON=python3.12 CONSTRAINTS=.ci/constraints/newest.txt

nightly-floor:
	$(MAKE) test PYTHON=python3.11 CONSTRAINTS=.ci/constraints/floor.txt

cuda-build:
	@test -x .venv-cuda/bin/python || $(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/pip install -q -c constraints.txt -e '.[dev]'
	.venv-cuda/bin/python -m pytest -m cuda_build
