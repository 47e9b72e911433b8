"""torchtitan's llama: its names, and its order of the rows that rotary positions turn."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.checkpoint.making import write_recipe
from toolkit.errors import CheckpointError
from toolkit.extras.imports.dcp import DCP
from toolkit.extras.imports.run import recipe_model, shards_of
from toolkit.intake.load import load_recipe

HEADS, GROUPS, SIZE = 4, 2, 16
NAMES = {
    "tok_embeddings.weight": (320, 64),
    "norm.weight": (64,),
    **{
        f"layers.{layer}.{name}.weight": shape
        for layer in range(2)
        for name, shape in {
            "attention.wq": (64, 64), "attention.wk": (32, 64), "attention.wv": (32, 64),
            "attention.wo": (64, 64), "feed_forward.w1": (128, 64),
            "feed_forward.w2": (64, 128), "feed_forward.w3": (128, 64),
            "attention_norm": (64,), "ffn_norm": (64,),
        }.items()
    },
}  # fmt: skip


def saved(folder: Path) -> dict[str, Tensor]:
    """Random values in torchtitan's form; the weights."""
    weights = {name: torch.randn(shape) for name, shape in NAMES.items()}
    states = {"step": torch.tensor(3.0)}
    flat = {
        f"optimizer.state.{name}.{key}": states.get(key, value * 2)
        for name, value in weights.items()
        for key in ("exp_avg", "exp_avg_sq", "step")
    }
    dcp.save({**weights, **flat}, checkpoint_id=folder, no_dist=True)
    return weights


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_attention_scores_are_the_same(tmp_path: Path) -> None:
    """Of torchtitan's rotation of neighbours as complex numbers, and of transformers'."""
    model = recipe_model(load_recipe(write_recipe(tmp_path)))
    theirs = saved(tmp_path / "titan")
    state = DCP.read(tmp_path / "titan", model)
    ours = {one.blocks[0].tensor: one for one in shards_of(state, model)}
    assert state.step == 3
    assert ours.keys() == model.tensors.keys()
    mlp = ours["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(
        mlp.get("exp_avg"), 2 * theirs["layers.1.feed_forward.w3.weight"].view(-1)
    )

    hidden = torch.randn(5, 64)
    angles = torch.outer(torch.arange(5.0), 10_000.0 ** -(torch.arange(0, SIZE, 2) / SIZE))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def neighbours(name: str) -> Tensor:
        values = hidden @ theirs[f"layers.0.attention.{name}.weight"].T
        pairs = torch.view_as_complex(values.view(5, -1, SIZE // 2, 2))
        return torch.view_as_real(pairs * turns).flatten(2)

    def halves(name: str) -> Tensor:
        weight = ours[f"model.layers.0.self_attn.{name}.weight"].get("weight").view(-1, 64)
        return (hidden @ weight.T).view(1, 5, -1, SIZE).transpose(1, 2)

    both = torch.cat([angles, angles], dim=-1)[None]
    query, key = apply_rotary_pos_emb(
        halves("q_proj"), halves("k_proj"), both.cos(), both.sin()
    )
    expected = torch.einsum(
        "qhd,khd->hqk",
        neighbours("wq"),
        neighbours("wk").repeat_interleave(HEADS // GROUPS, dim=1),
    )
    found = query[0] @ key[0].repeat_interleave(HEADS // GROUPS, dim=0).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_alone_are_refused(tmp_path: Path) -> None:
    model = recipe_model(load_recipe(write_recipe(tmp_path)))
    weights = {name: torch.zeros(shape) for name, shape in model.parameters.items()}
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "weights", no_dist=True)
    with pytest.raises(CheckpointError, match="holds no states of AdamW"):
        DCP.read(tmp_path / "weights", model)
