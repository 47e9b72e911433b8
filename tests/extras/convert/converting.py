"""Conversions there and back, and what they must keep."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from toolkit.extras.convert.source import open_source
from toolkit.extras.convert.to_huggingface import ToHuggingFace
from toolkit.extras.convert.to_megatron import ToMegatron
from toolkit.models.new_folder import appearing


def to_megatron_folder(hf: Path, dst: Path, vocab_multiple: int = 128) -> Path:
    with appearing(dst) as folder:
        ToMegatron(open_source(hf), vocab_multiple).write(folder, lambda _: None)
    return dst


def to_hf_folder(megatron: Path, dst: Path, config: Path | None = None) -> Path:
    with appearing(dst) as folder:
        ToHuggingFace(open_source(megatron, config)).write(folder, lambda _: None)
    return dst


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same_model(found: Path, expected: Path) -> None:
    """Names, shapes, dtypes and every bit."""
    ours, theirs = tensors_of(found), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name
    config = (found / "config.json").read_bytes()
    assert config == (expected / "config.json").read_bytes()


def rewrite(folder: Path, change: Any) -> None:
    """Change the tensors of a saved model."""
    tensors = tensors_of(folder)
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
