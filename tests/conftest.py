"""Fixtures for every test: no network, no leftovers of the user's environment."""

import os

import hypothesis
import pytest

from toolkit.engines.deepspeed_ops import build, preflight, put_ninja_on_path

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[name] = "1"
os.environ.setdefault("DS_ACCELERATOR", "cpu")
hypothesis.settings.register_profile("dmt", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("dmt")
put_ninja_on_path()  # what another ninja has built is built again, by every test that loads it


@pytest.fixture(scope="session")
def compiled_ops() -> None:
    """DeepSpeed's compiled operators for offload, built once (a few minutes when cold)."""
    ops = ("cpu_adam", "async_io")
    preflight(ops)
    build(ops, print)
