"""Fixtures of the engines' tests."""

import warnings
from collections.abc import Iterator

import pytest

from tests.forked import end_groups


@pytest.fixture
def megatron_core() -> None:
    """megatron-core, imported; what torch's compiler says about itself is not our matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from toolkit.models.megatron import cpu

        cpu.before_import()
        import megatron.core.models.gpt.gpt_model
        import megatron.core.optimizer  # noqa: F401


@pytest.fixture(scope="package", autouse=True)
def ranks_that_wait() -> Iterator[None]:
    """Ranks are shared by the files of this folder; they leave when other tests come."""
    yield
    end_groups()
