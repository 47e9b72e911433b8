# Each target does all its own set-up in .venv, or in .venv-NAME with CONSTRAINTS=…/NAME.txt (docs/install.md).
#   make demo      plan, rehearse and train a small model on this machine
#   make test      run the tests of each part, and the most telling ones of whole runs
#   make test-all  run all tests but the long ones (CI does); test-failed: those that failed again, one at a time
#   make check     lint, format, types (CI does, too); docs: the documentation as a site, in build/site
#   make soak      long fault and stress runs, the widest products of layouts (not part of CI)
#   make nightly   make test with the newest and with the oldest versions (not part of CI)

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := $(if $(filter constraints.txt,$(CONSTRAINTS)),.venv,.venv-$(basename $(notdir $(CONSTRAINTS))))
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --instafail

.PHONY: setup demo test test-all test-failed check docs soak nightly
setup: $(VENV)/.ready
# What DMT itself needs. A CPU-only build of torch is taken where there is no NVIDIA driver and an index has one.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; ok = (3, 11) <= v < (3, 14); sys.exit(None if ok else f"error: Python 3.11 to 3.13 is needed, {sys.executable} is {v.major}.{v.minor}\n  fix: make PYTHON=python3.12 $(or $(MAKECMDGOALS),setup)")'
	@echo "installing torch, DeepSpeed, megatron-core and Hugging Face's libraries in $(VENV), which takes minutes and prints nothing"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
	  torch=$$(grep '^torch==' $(CONSTRAINTS)); \
	  if command -v nvidia-smi >/dev/null; then $(BIN)/pip install -q "$$torch"; \
	  else $(BIN)/pip install -q "$$torch+cpu" 2>/dev/null || $(BIN)/pip install -q "$$torch"; fi; \
	fi
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/.ready: $(VENV)/.installed  # what tests, checks and pages need
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[dev,docs,tensorboard,ray]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/dmt plan llama-bytes
	$(BIN)/dmt rehearse llama-bytes --layouts ddp,zero3,fsdp3,megatron-tp2,megatron-pp2
	$(BIN)/dmt launch llama-bytes --set training.steps=50

test: setup
	$(PYTEST) -m '(not slow or quick) and not gpu and not soak and not cuda_build'

test-all: setup
	$(PYTEST)

test-failed: setup
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

check: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy && $(BIN)/mypy launch/*.py
	$(BIN)/python -m toolkit.recipe.docs --check

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

soak: setup
	$(BIN)/python -m pytest -m soak --timeout 3600

nightly:  # each part runs, whatever became of the other
	status=0; for set in 12:newest 11:floor; do $(MAKE) test PYTHON=python3.$${set%:*} CONSTRAINTS=.ci/constraints/$${set#*:}.txt || status=1; done; exit $$status
