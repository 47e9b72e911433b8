"""The exported folder is the one that transformers itself would write."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.checkpoint.conftest import MANIFEST
from tests.models.test_weights import FAMILIES, filled, section
from toolkit.checkpoint.export import export
from toolkit.checkpoint.saver import Saver
from toolkit.checkpoint.shards import QUANTITIES, StateShard, parameter_blocks
from toolkit.checkpoint.store import CheckpointStore
from toolkit.errors import CheckpointError
from toolkit.models import huggingface as hf


def checkpoint_of(model: Any, folder: Path, leave_out: str = "", **recipe: str) -> Path:
    """A checkpoint of a transformers model; a tensor may be forgotten."""
    state = [
        StateShard(
            parameter_blocks(name, value.shape),
            dict.fromkeys(QUANTITIES, value),
            saved_here=True,
        )
        for name, value in model.named_parameters()
        if name != leave_out
    ]
    made = folder / "companions"
    dtype = {"bf16": torch.bfloat16}.get(recipe.get("precision", ""), torch.float32)
    hf.save_companions(model.config, dtype, made)
    companions = {f"hf/{path.name}": path.read_bytes() for path in made.iterdir()}
    saver = Saver(CheckpointStore(folder, keep=1), asynchronous=False)
    manifest = replace(MANIFEST, recipe={"training": {"precision": "fp32"} | recipe})
    saver.save(manifest, state, companions)
    saved = saver.finished(wait=True)
    saver.close()
    assert saved is not None and saved.problem is None
    return folder / "step-00000001"


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_those_of_save_pretrained(family: str, tmp_path: Path) -> None:
    model = filled(section(family))
    export(checkpoint_of(model, tmp_path), tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / f / "model.safetensors") for f in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    configs = [
        json.loads((tmp_path / f / "config.json").read_text()) for f in ("ours", "theirs")
    ]
    assert configs[0] == configs[1]
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours")


def test_weights_have_the_precision_of_the_recipe(tmp_path: Path) -> None:
    model = filled(section("llama"))
    export(checkpoint_of(model, tmp_path, precision="bf16"), tmp_path / "ours")
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    norm = "model.norm.weight"
    assert torch.equal(tensors[norm], dict(model.named_parameters())[norm].bfloat16())
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_missing_tensor_is_named_and_nothing_appears(tmp_path: Path) -> None:
    """PAINS 4: ZeRO-3 saves incomplete weights."""
    name = "model.layers.1.mlp.up_proj.weight"
    folder = checkpoint_of(filled(section("llama")), tmp_path, leave_out=name)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj.* it has None"):
        export(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
