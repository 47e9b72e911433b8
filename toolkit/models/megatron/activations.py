"""Fewer activations on the device in megatron-core's layers (`toolkit.models.activations`)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.mlp import MLP

from toolkit.layout import Layout
from toolkit.models.activations import tile, with_inputs_on_host


def save_less(chunks: Iterable[Any], layout: Layout) -> None:
    """Let a rank's chunks of layers keep no more on the device than `layout` says."""
    for chunk in chunks:
        if layout.offload_activations:
            chunk.decoder.forward = _inputs_on_host()(chunk.decoder.forward)
        for layer in chunk.decoder.layers if layout.mlp == "tiled" else ():
            if isinstance(layer.mlp, MLP):
                tile(layer.mlp, positions=0)


@contextmanager
def _inputs_on_host() -> Iterator[None]:
    """Context in which the inputs of layers that a block recomputes are saved in host memory.

    megatron-core's own `cpu_offloading` is neither for recomputed layers nor for pipelines.
    """
    own = tensor_parallel.checkpoint
    tensor_parallel.checkpoint = with_inputs_on_host(own)
    try:
        yield
    finally:
        tensor_parallel.checkpoint = own
