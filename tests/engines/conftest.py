"""Fixtures of the engines' tests."""

import warnings

import pytest


@pytest.fixture
def megatron_core() -> None:
    """megatron-core, imported; what torch's compiler says about itself is not our matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from toolkit.models.megatron import cpu

        cpu.before_import()
        import megatron.core.models.gpt.gpt_model
        import megatron.core.optimizer  # noqa: F401
