"""Torch's context parallel on CPUs, for which it has no kernels: its ring over the operator
that computes attention there, so that what Accelerate and Trainer do around it can be run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn import functional

_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
forward = getattr(torch.ops.aten, _FLASH)
backward = getattr(torch.ops.aten, f"{_FLASH}_backward")


def _forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Any:
    return forward(q, k, v, 0.0, is_causal, scale=scale)


def _backward(
    *,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> Any:
    saved = (query, key, value, out, logsumexp, 0.0, is_causal)
    return backward(grad_out, *saved, scale=scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, *arguments: Any) -> Tensor:
        *tensors, context.scale, context.group = arguments
        out, sums = ring._templated_ring_attention(
            context.group, 2, _forward, *tensors, is_causal=True, scale=context.scale
        )
        context.save_for_backward(*tensors, out, sums)
        return out

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = ring._templated_ring_attention_backward(
            *(context.group, 2, _backward, gradients[0].contiguous(), "grad_out"),
            *context.saved_tensors,
            is_causal=True,
            scale=context.scale,
        )
        return *found[:3], None, None


@contextmanager
def context_parallel_on_cpus() -> Iterator[set[int]]:
    """The lengths that attention was computed with on this rank."""
    plain, lengths = functional.scaled_dot_product_attention, set[int]()

    def enable(*, mesh: DeviceMesh, **_: object) -> None:
        def attend(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            is_causal: bool = False,
            scale: float | None = None,
            **_: Any,
        ) -> Any:
            assert attn_mask is None and is_causal, "what torch's kernels take"
            lengths.add(query.shape[2])
            groups = query.shape[1] // key.shape[1]
            key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
            return _Ring.apply(query, key, value, scale, mesh.get_group())

        functional.scaled_dot_product_attention = attend

    def disable() -> None:
        functional.scaled_dot_product_attention = plain

    name = "able_context_parallel_dispatcher_impl"
    with patch.object(ring, f"_en{name}", enable), patch.object(ring, f"_dis{name}", disable):
        yield lengths
