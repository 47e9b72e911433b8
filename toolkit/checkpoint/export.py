"""From a checkpoint of any layout to a Hugging Face folder, one tensor in memory at a time."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import whole_block
from toolkit.errors import CheckpointError
from toolkit.models import huggingface as hf
from toolkit.models.convert import appearing
from toolkit.models.convert.safetensors_stream import Entry, write_model
from toolkit.models.families import FAMILIES
from toolkit.models.weights import checkpoint_names

COMPANIONS = "hf"
"""Folder in a checkpoint with what a Hugging Face folder has beside weights."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ELEMENTS_AT_ONCE = 1 << 24
"""Elements of one tensor that are read at a time."""


def export(folder: Path, dst: Path, tick: Callable[[int], None] = lambda _: None) -> None:
    """Write config, tokenizer and sharded safetensors of the checkpoint `folder` into `dst`.

    Weights are rounded to the type that the recipe computes in. `tick` gets the bytes of every
    piece that was written. `dst` appears when it is complete and must not exist.
    Raises CheckpointError for a damaged checkpoint, DataError when writing fails.
    """
    manifest, state = Manifest.read(folder), SavedState(folder)
    dtype = DTYPES.get(manifest.recipe["training"]["precision"], torch.float32)
    companions = folder / COMPANIONS
    config = _check_complete(state, companions)
    entries = [entry.telling(tick) for entry in _entries(state, dtype, config.model_type)]
    with appearing(dst) as hidden:
        shutil.copytree(companions, hidden, dirs_exist_ok=True)
        write_model(hidden, entries)


def _check_complete(state: SavedState, companions: Path) -> PretrainedConfig:
    """The model's config. Raises CheckpointError when the checkpoint lacks a part of it."""
    try:
        config = AutoConfig.from_pretrained(companions)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{companions} describes no model: {error}") from error
    wanted = {
        piece.name: piece.shape
        for name, shape in hf.parameter_shapes(config).items()
        for piece in checkpoint_names(name, shape)
    }
    if differing := sorted(set(wanted.items()) ^ set(state.shapes.items())):
        name = differing[0][0]
        raise CheckpointError(
            f"{state.folder} is not the model of its own {companions.name}/config.json: {name} "
            f"should have the shape {wanted.get(name)}, it has {state.shapes.get(name)}"
        )
    return config


def _entries(state: SavedState, dtype: torch.dtype, model_type: str) -> Iterator[Entry]:
    """Every tensor as transformers would save it."""
    for name, shape in state.shapes.items():
        stored = FAMILIES[model_type].published_name(name)
        yield Entry(stored, dtype, shape, _Reader(state, name, shape, dtype))


@dataclass(frozen=True)
class _Reader:
    """Reads a tensor a few rows at a time."""

    state: SavedState
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self) -> Iterator[Tensor]:
        whole = whole_block(self.name, self.shape)
        width = 1 if whole.columns is None else whole.columns[1]
        step = max(1, ELEMENTS_AT_ONCE // width)
        for first in range(0, self.shape[0], step):
            rows = first, min(first + step, self.shape[0])
            block = type(whole)(self.name, rows, whole.columns, transposed=False)
            yield self.state.read("weight", block).to(self.dtype)
