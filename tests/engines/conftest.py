"""Fixtures of the engines' tests."""

import warnings
from collections.abc import Iterator

import pytest
import torch

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


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For a reference in this process: the ranks have the cores, too, and on a busy machine two
    threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package", autouse=True)
def ranks_that_wait() -> Iterator[None]:
    """Ranks are shared by the files of this folder; they leave when other tests come."""
    yield
    end_groups()
