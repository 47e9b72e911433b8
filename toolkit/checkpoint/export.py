"""From a checkpoint of any layout to a Hugging Face folder, one tensor in memory at a time."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from toolkit.checkpoint.export_adapters import MergedWeights, saved_lora, write_peft
from toolkit.checkpoint.manifest import Manifest, file_in
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import stored_shape
from toolkit.errors import CheckpointError, DataError
from toolkit.models import huggingface as hf
from toolkit.models.families.tensors import overlaps
from toolkit.models.new_folder import appearing
from toolkit.models.pretrained import saved_tensors
from toolkit.models.safetensors import (
    TensorToWrite,
    write_model,
)
from toolkit.models.weights import checkpoint_names, is_correction_bias, shapes_of

COMPANIONS = "hf"
"""Folder in a checkpoint with the files of a Hugging Face folder except the weights."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def exported_dtype(manifest: Manifest) -> torch.dtype:
    """The type that the recipe computes in, which is that of an exported model."""
    return DTYPES.get(manifest.precision, torch.float32)


def exported_bytes(folder: Path, *, merged: bool = False) -> int:
    """Bytes of the weights that `export` writes. Raises CheckpointError."""
    manifest, state = Manifest.read(folder), SavedState(folder)
    dtype, shapes = exported_dtype(manifest), state.shapes
    if merged:
        shapes = hf.checkpoint_shapes(check_complete(state))
    elif manifest.adapter is not None:
        dtype = torch.float32
    return sum(_dtype_of(name, dtype).itemsize * prod(shapes[name]) for name in shapes)


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype of a tensor of a model in `dtype`: transformers keeps correction biases in fp32."""
    return torch.float32 if is_correction_bias(name) else dtype


def export(
    folder: Path,
    dst: Path,
    tick: Callable[[int], None] = lambda _: None,
    *,
    merged: bool = False,
) -> None:
    """Write config, tokenizer and sharded safetensors of the checkpoint `folder` into `dst`.

    Weights are rounded to the type that the recipe computes in. For a run with adapters, only
    these are written, in fp32 and in PEFT's format, unless they are `merged` into their base,
    which is then read from the source in the recipe. `tick` gets the bytes of every piece that
    was written. `dst` appears when it is complete and must not exist. Raises CheckpointError
    for a damaged checkpoint, and for a missing or different base; DataError if writing fails.
    """
    manifest, state = Manifest.read(folder), SavedState(folder)
    config = check_complete(state)
    lora = saved_lora(manifest, config)
    if merged and lora is None:
        raise CheckpointError(f"{folder} has no adapters: its export is the whole model")
    companions = [name for name in manifest.files if Path(name).parent == Path(COMPANIONS)]
    files = [file_in(folder, name) for name in companions]
    with appearing(dst) as hidden:
        for file in files:
            if lora is None or merged or file.name not in hf.MODEL_FILES:
                shutil.copyfile(file, hidden / file.name)
        if lora is not None and not merged:
            write_peft(hidden, state, lora, manifest, tick)
            return
        source = state if lora is None else MergedWeights(state, lora, manifest)
        tensors = entries(source, exported_dtype(manifest), config)
        write_model(hidden, [tensor.telling(tick) for tensor in tensors])


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
    manifest = Manifest.read(state.folder)
    lora = saved_lora(manifest, config)
    wanted = hf.checkpoint_shapes(config) if lora is None else lora.shapes
    wanted = {name: stored_shape(shape) for name, shape in wanted.items()}
    if differing := sorted(wanted.items() ^ state.shapes.items()):
        name = differing[0][0]
        raise CheckpointError(
            f"{state.folder} is not the model of its own {companions.name}/config.json: {name} "
            f"should have the shape {wanted.get(name)}, it has {state.shapes.get(name)}"
        )
    return config


class Weights(Protocol):
    """The tensors of a model, as `checkpoint_names` names them."""

    def in_pieces(self, quantity: str, tensor: str) -> Iterable[Tensor]:
        """A whole `weight`, some rows at a time."""


def entries(
    state: Weights, dtype: torch.dtype, config: PretrainedConfig
) -> Iterator[TensorToWrite]:
    """Every tensor as transformers would save it."""
    model = hf.meta_model(config)
    shapes = shapes_of(model)
    for name, saved in saved_tensors(model).items():
        start = 0
        for piece in saved if name in shapes else ():  # a tied head is the embedding
            kept, stop = _dtype_of(name, dtype), start + piece.numel
            pieces = partial(_elements, state, name, shapes[name], start, stop, kept)
            yield TensorToWrite(piece.name, kept, piece.shape, pieces)
            start = stop


def _elements(
    state: Weights,
    name: str,
    shape: tuple[int, ...],
    start: int,
    stop: int,
    dtype: torch.dtype,
) -> Iterator[Tensor]:
    """Elements [start, stop) of the flattened parameter `name`, in pieces."""
    tensors = checkpoint_names(name, shape)
    for tensor, low, high in overlaps(tensors, lambda one: one.numel, start, stop):
        offset = 0
        for piece in state.in_pieces("weight", tensor.name):
            part = piece.reshape(-1)[max(low - offset, 0) : max(high - offset, 0)]
            offset += piece.numel()
            if part.numel():
                yield part.to(dtype)
