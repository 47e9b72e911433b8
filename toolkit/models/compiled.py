"""Compiles decoder layers of transformers' models with torch: one graph for each batch shape.

Every layer is compiled as one graph (`fullgraph`), as torchtitan compiles its blocks, for one
static shape at a time: a graph does not depend on earlier shapes, so a resumed run has the same
ones. Identical layers share their graphs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from toolkit.errors import PlanError
from toolkit.layout import CompiledParts
from toolkit.system.compilers import private_folder

GRAPHS = 256
"""Largest number of graphs for one class of layers: its kinds (with a window, without), times
lengths of sequences, times those of `MicroBatch.ends`, times two, for training and evaluation.
torch's own limit is 8."""
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def compile_layers(model: nn.Module, parts: CompiledParts) -> None:
    """Compile `model`'s decoder layers. Does nothing if `parts` is `none`.

    Names, parameters and hooks do not change. Raises PlanError for a model without layers.
    """
    if parts == "none":
        return
    from toolkit.models.huggingface import decoder_layers  # which imports all of transformers

    layers = decoder_layers(model)
    if not layers:
        raise PlanError(
            f"kernels.compile: {type(model).__name__} has no decoder layers that transformers "
            "knows",
            fix="set it to none",
        )
    prepare()
    for layer in layers:
        layer.compile(fullgraph=True, dynamic=False)


def prepare() -> None:
    """Configure torch.compile in this process.

    Kernels are cached in a folder that only this user may write, unless
    `TORCHINDUCTOR_CACHE_DIR` names another: all users can write to torch's default.
    """
    os.environ.setdefault(_FOLDER, str(private_folder("inductor")))
    settings: Any = torch._dynamo.config
    settings.recompile_limit = GRAPHS
    settings.automatic_dynamic_shapes = False


@contextmanager
def eager() -> Iterator[None]:
    """Context in which compiled layers run eagerly, and nothing is compiled."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def explain_failures(setting: str) -> Iterator[None]:
    """Context, or decorator, that raises PlanError if torch cannot compile a layer for this
    setting of `kernels`."""
    try:
        yield
    except TorchDynamoException as error:
        reason = next(filter(None, map(str.strip, str(error).splitlines())), "")
        raise PlanError(
            f"kernels.{setting}: torch cannot compile the layers of this model "
            f"({type(error).__name__}: {reason})",
            fix="set it to none",
        ) from error
