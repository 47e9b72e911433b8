# Each target does all its own set-up in .venv; a second run starts within seconds.
#   make demo      train a small model on this machine and check the result
#   make test      run the tests of each part, and the most telling ones of whole runs: a quarter of an hour
#   make test-all  run all tests but the long ones: about an hour (CI does)
#   make check     lint, format, types (CI does, too)
#   make soak      long fault and stress runs, the widest products of layouts (not part of CI)
#   make cuda-build  rehearse GPUs with a CUDA build of torch, 5 GB in .venv-cuda (not part of CI)

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --instafail

.PHONY: setup demo test test-all check soak cuda-build

setup: $(READY)

# A CPU-only build of torch is taken where there is no NVIDIA driver and an index has one.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; ok = (3, 11) <= v < (3, 14); sys.exit(None if ok else f"error: Python 3.11 to 3.13 is needed, {sys.executable} is {v.major}.{v.minor}\n  fix: make PYTHON=python3.12 $(or $(MAKECMDGOALS),setup)")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@if ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
	  torch=$$(grep '^torch==' constraints.txt); \
	  if command -v nvidia-smi >/dev/null; then $(BIN)/pip install -q "$$torch"; \
	  else $(BIN)/pip install -q "$$torch+cpu" 2>/dev/null || $(BIN)/pip install -q "$$torch"; fi; \
	fi
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,tensorboard,ray]'
	@touch $@

demo: setup
	@$(BIN)/python launch/demo.py

test: setup
	$(PYTEST) -m '(not slow or quick) and not gpu and not soak and not cuda_build'

test-all: setup
	$(PYTEST)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m toolkit.recipe.docs --check

soak: setup
	$(BIN)/python -m pytest -m soak --timeout 3600

cuda-build:
	@test -x .venv-cuda/bin/python || $(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/pip install -q -c constraints.txt -e '.[dev]'
	.venv-cuda/bin/python -m pytest -m cuda_build
