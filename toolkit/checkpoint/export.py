"""From a checkpoint of any layout to a Hugging Face folder, one tensor in memory at a time."""

import shutil
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from toolkit.checkpoint.manifest import Manifest, file_in
from toolkit.checkpoint.saved_state import SavedState
from toolkit.errors import CheckpointError, DataError
from toolkit.models import huggingface as hf
from toolkit.models.convert import appearing
from toolkit.models.convert.safetensors_stream import TensorToWrite, write_model
from toolkit.models.families import FAMILIES

COMPANIONS = "hf"
"""Folder in a checkpoint with what a Hugging Face folder has besides weights."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def exported_dtype(manifest: Manifest) -> torch.dtype:
    """The type that the recipe computes in, which is that of an exported model."""
    return DTYPES.get(manifest.precision, torch.float32)


def exported_bytes(folder: Path) -> int:
    """Bytes of the weights that `export` writes. Raises CheckpointError."""
    itemsize = exported_dtype(Manifest.read(folder)).itemsize
    return itemsize * sum(map(prod, SavedState(folder).shapes.values()))


def export(folder: Path, dst: Path, tick: Callable[[int], None] = lambda _: None) -> None:
    """Write config, tokenizer and sharded safetensors of the checkpoint `folder` into `dst`.

    Weights are rounded to the type that the recipe computes in. `tick` gets the bytes of every
    piece that was written. `dst` appears when it is complete and must not exist.
    Raises CheckpointError for a damaged checkpoint, DataError when writing fails.
    """
    manifest, state = Manifest.read(folder), SavedState(folder)
    dtype = exported_dtype(manifest)
    config = check_complete(state)
    entries = [entry.telling(tick) for entry in _entries(state, dtype, config.model_type)]
    companions = [name for name in manifest.files if Path(name).parent == Path(COMPANIONS)]
    files = [file_in(folder, name) for name in companions]
    with appearing(dst) as hidden:
        for file in files:
            shutil.copyfile(file, hidden / file.name)
        write_model(hidden, entries)


def check_complete(state: SavedState) -> PretrainedConfig:
    """The model's config. Raises CheckpointError when the checkpoint lacks a part of it."""
    companions = state.folder / COMPANIONS
    for path in (companions / hf.CONFIG, *companions.glob("config*.json")):
        file_in(state.folder, f"{COMPANIONS}/{path.name}")
    try:
        config = hf.read_config(companions)
    except DataError as error:
        raise CheckpointError(
            f"{companions} describes no model: {error.message}", fix=error.fix
        ) from error
    wanted = hf.checkpoint_shapes(config)
    if differing := sorted(wanted.items() ^ state.shapes.items()):
        name = differing[0][0]
        raise CheckpointError(
            f"{state.folder} is not the model of its own {companions.name}/config.json: {name} "
            f"should have the shape {wanted.get(name)}, it has {state.shapes.get(name)}"
        )
    return config


def _entries(state: SavedState, dtype: torch.dtype, model_type: str) -> Iterator[TensorToWrite]:
    """Every tensor as transformers would save it."""
    for name, shape in state.shapes.items():

        def pieces(name: str = name) -> Iterator[Tensor]:
            return (piece.to(dtype) for piece in state.in_pieces("weight", name))

        yield TensorToWrite(FAMILIES[model_type].published_name(name), dtype, shape, pieces)
