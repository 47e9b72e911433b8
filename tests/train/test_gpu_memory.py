"""Out of memory, in the forms in which it comes from a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.train import worker
from toolkit.train.gpu_memory import out_of_memory

FORMS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …\nmore"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously …"),
    RuntimeError("NCCL error …: ncclUnhandledCudaError: …\nCuda failure 2 'out of memory'"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]


def in_a_step(*, has_stepped: bool) -> Any:
    """A rank that was in a step."""
    return SimpleNamespace(marks=SimpleNamespace(doing="step 8", has_stepped=has_stepped))


@pytest.mark.parametrize("error", FORMS, ids=lambda error: str(error)[:20])
def test_every_form_is_named(error: Exception) -> None:
    code, message = worker._failure(worker._explained(error, in_a_step(has_stepped=True)))
    assert code == 4
    assert message.startswith("out of memory in phase 'step 8' (")
    assert "fix: --set training.micro_batch_size=1" in message
    assert str(error).partition("\n")[0] in message


def test_only_a_start_that_made_a_step_is_repeated() -> None:
    for has_stepped in (False, True):
        explained = worker._explained(FORMS[0], in_a_step(has_stepped=has_stepped))
        assert explained.retry is has_stepped
    assert not worker._explained(FORMS[0], None).retry


def test_other_errors_stay_what_they_are() -> None:
    for text in ("an illegal memory access was encountered", "CUBLAS_STATUS_EXECUTION_FAILED"):
        assert out_of_memory(RuntimeError(text), "step 1", retry=True) is None


def test_an_operator_without_a_fixed_order_is_the_users_mistake() -> None:
    error = RuntimeError("put_ does not have a deterministic implementation, but you set …")
    assert not worker._explained(error, None).retry
    code, message = worker._failure(worker._explained(error, None))
    assert code == 4 and "fix: set training.deterministic to false" in message
