"""Fewer activations on the device: layer inputs in host memory, MLPs in chunks."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from toolkit.errors import PlanError
from toolkit.layout import mlp_chunks

Packed = Tensor | tuple[torch.device, Tensor]


def with_inputs_on_host(recompute: Callable[..., Any]) -> Callable[..., Any]:
    """`recompute(layer, …, hidden, …)`, which saves its arguments for the backward pass, with
    those of the shape of `hidden`, the first tensor, kept in host memory until then.

    Masks and rotations, which all layers share, stay where they are. torch's `save_on_cpu`
    copies in the stream that computes. Here copies have a stream of their own: the next layer
    runs meanwhile, and in the backward pass the host, ahead of the GPU, starts a layer's copy
    before the GPU needs it.
    """

    @wraps(recompute)
    def recomputed(*arguments: Any, **options: Any) -> Any:
        shape = _shape(arguments)  # hooks outlive the call, and must not hold the tensor itself

        def pack(saved: Tensor) -> Packed:
            return _to_host(saved) if saved.shape == shape else saved

        with saved_tensors_hooks(pack, _from_host):
            return recompute(*arguments, **options)

    return recomputed


def _shape(arguments: tuple[Any, ...]) -> torch.Size:
    for one in arguments:
        if isinstance(one, Tensor):
            return one.shape
    raise PlanError(
        "parallel.offload_activations: this model's layers take their input by name, and "
        "recompute then saves none",
        fix="set it to false",
    )


def _to_host(saved: Tensor) -> Packed:
    device = saved.device
    held = torch.empty_like(saved, device="cpu", pin_memory=saved.is_cuda)
    if saved.is_cuda:
        _stream(device).wait_stream(torch.cuda.current_stream(device))
        saved.record_stream(_stream(device))
    with _copying(device):
        held.copy_(saved, non_blocking=True)
    return device, held


def _from_host(packed: Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, held = packed
    with _copying(device):
        found = held.to(device, non_blocking=True)
    if found.is_cuda:
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(_stream(device))
        found.record_stream(computing)
    return found


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _copying(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext()


def tile(mlp: nn.Module, positions: int) -> None:
    """Let an MLP compute some positions at a time, and again in the backward pass: what it
    keeps between its linear layers is of one chunk. `positions`: their dimension.

    Its parameters' gradients are sums over the chunks that autograd makes before any hook of an
    engine sees them: exact where they are reduced or sharded, too.
    """
    whole = mlp.forward

    def compute(chunk: Tensor, *arguments: Any, **options: Any) -> Any:
        return whole(chunk.contiguous(), *arguments, **options)  # a copy that is not saved

    def forward(hidden: Tensor, *arguments: Any, **options: Any) -> Any:
        outputs = [
            checkpoint(compute, chunk, *arguments, use_reentrant=False, **options)
            for chunk in hidden.chunk(mlp_chunks(hidden.numel()), positions)
        ]
        if isinstance(outputs[0], Tensor):
            return torch.cat(outputs, positions)
        parts, biases = zip(*outputs, strict=True)  # megatron-core's, which it adds later
        return torch.cat(parts, positions), biases[0]

    mlp.forward = forward
