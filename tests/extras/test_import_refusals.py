"""Checkpoints of other tools that hold more, or something else, than the recipe's model."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.checkpoint.making import MODEL, write_recipe
from tests.models.small import filled
from toolkit.checkpoint.shards import stored_values, with_offsets
from toolkit.errors import CheckpointError
from toolkit.extras.convert.checkpoint_keys import written_place
from toolkit.extras.convert.source import TRACKER, iteration_folder
from toolkit.extras.convert.torch_dist import Writer
from toolkit.extras.imports.base import ForeignState, RecipeModel
from toolkit.extras.imports.dcp import DCP
from toolkit.extras.imports.megatron_dist import MEGATRON
from toolkit.extras.imports.run import recipe_model
from toolkit.intake.load import load_recipe
from toolkit.models.families import mapped
from toolkit.models.families.base import Instance
from toolkit.models.families.tensors import blocks

REGISTERED = (
    "input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv",
    "pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip
MOMENTS = {"exp_avg": 2, "exp_avg_sq": 3}
"""Of each weight, so many times its value."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RecipeModel:
    return recipe_model(load_recipe(write_recipe(tmp_path_factory.mktemp("recipe"))))


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return {name: p.detach() for name, p in filled(MODEL).named_parameters()}


def held(
    instance: Instance, weights: Mapping[str, Tensor], rank: int, tp: int, rows: int
) -> Tensor:
    """A rank's part; of the vocabulary, Megatron splits the padded rows."""
    if instance.tensor.padded:
        table = weights["model.embed_tokens.weight"]
        return torch.cat([table, torch.zeros(rows - len(table), table.shape[1])]).chunk(tp)[
            rank
        ]
    inside = blocks(instance.tensor, rank, tp, layer=instance.layer, expert=instance.expert)
    return torch.cat(
        [weights[b.tensor][slice(*b.rows)][..., slice(*(b.columns or (None,)))] for b in inside]
    )


def place_of(instance: Instance) -> tuple[int, int]:
    module = instance.tensor.name.partition("{layer}.")[2].rpartition(".")[0]
    if instance.layer is not None:
        return 1 + instance.layer, REGISTERED.index(module)
    return (0 if "embedding" in instance.tensor.name else 99), 0


def write_megatron(
    folder: Path,
    model: RecipeModel,
    weights: Mapping[str, Tensor],
    rows: int = 320,
    flat: int = 0,
    dtype: torch.dtype = torch.float32,
    extra: Mapping[str, Tensor] | None = None,
) -> None:
    """A checkpoint with so many rows of the vocabulary; the optimizer's states by name, or as
    flat buffers of so many tensor-parallel ranks."""
    megatron = mapped(model.config.to_dict())
    instances = sorted(megatron.instances(), key=place_of)
    with Writer(folder) as writer:
        for one in instances:
            place = written_place(megatron, one)
            for rank in range(flat if one.tensor.padded and flat else 1):
                part = held(one, weights, rank, flat if one.tensor.padded and flat else 1, rows)
                lead, height = (1,) * len(place.index), rows if one.tensor.padded else len(part)
                part = part.view(*lead, *part.shape)
                size = (*place.sizes, height, *part.shape[len(lead) + 1 :])
                start = rank * part.shape[len(lead)]
                offset = (*place.index, start, *(0,) * (part.dim() - len(lead) - 1))
                writer.add(place.key, size, offset, part.to(dtype))
                for moment, factor in {} if flat else MOMENTS.items():
                    key = f"optimizer.state.{moment}.{place.key}"
                    writer.add(key, size, offset, part * factor)
        for rank in range(flat):
            values: list[Tensor] = []
            for one in instances[::-1]:
                values.append(torch.zeros(-sum(map(len, values)) % 64))
                values.append(held(one, weights, rank, flat, rows).reshape(-1))
            bucket = torch.cat(values)
            for quantity, factor in {"param": 1, **MOMENTS}.items():
                key = (
                    f"optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_0.dtype_(torch.float32"
                )
                key += f", torch.float32).bucket_idx_0.{quantity}"
                writer.add(key, (len(bucket),), (0,), bucket * factor)
        for name, value in (extra or {}).items():
            writer.add(name, value.shape, (0,) * value.dim(), value)
        torch.serialization.set_crc32_options(True)
        writer.finish({"iteration": 5, "args": argparse.Namespace(consumed_train_samples=20)})


def check(state: ForeignState, weights: Mapping[str, Tensor]) -> None:
    """Every element is that of the weights, and the moments are their multiples."""
    elements = 0
    for shard in state.shards:
        for quantity, factor in {"weight": 1, **MOMENTS}.items():
            values = shard.get(quantity)
            for block, offset in with_offsets(shard.blocks):
                found, stored = stored_values(block, offset, values), block.stored
                expected = weights[stored.tensor][slice(*stored.rows)]
                expected = expected[..., slice(*(stored.columns or (None,)))] * factor
                assert torch.equal(found.reshape(-1), expected.reshape(-1)), stored
                elements += found.numel()
    assert elements == 3 * sum(one.numel() for one in weights.values())


@pytest.mark.parametrize(
    ("rows", "dtype"), [(384, torch.float32), (512, torch.bfloat16), (640, torch.float32)]
)
def test_padding_is_split_as_megatron_does(
    rows: int,
    dtype: torch.dtype,
    model: RecipeModel,
    weights: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    write_megatron(tmp_path / "saved", model, weights, rows, flat=2, dtype=dtype)
    if rows == 640:  # twice the vocabulary
        with pytest.raises(CheckpointError, match=r"has the shape \(640, 64\)"):
            MEGATRON.read(tmp_path / "saved", model)
        return
    check(MEGATRON.read(tmp_path / "saved", model), weights)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("output_layer.weight", (320, 64)),
        ("decoder.layers.self_attention.linear_qkv.bias", (2, 128)),
        ("optimizer.state.max_exp_avg_sq.decoder.final_layernorm.weight", (64,)),
    ],
)
@pytest.mark.parametrize("flat", [0, 1])
def test_no_tensor_of_megatron_is_dropped(
    name: str,
    shape: tuple[int, ...],
    flat: int,
    model: RecipeModel,
    weights: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    write_megatron(
        tmp_path / "saved", model, weights, flat=flat, extra={name: torch.ones(shape)}
    )
    with pytest.raises(CheckpointError, match=rf"has {name}"):
        MEGATRON.read(tmp_path / "saved", model)


def test_megatron_weights_without_masters(
    model: RecipeModel, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    write_megatron(tmp_path / "whole", model, weights)
    check(MEGATRON.read(tmp_path / "whole", model), weights)
    write_megatron(tmp_path / "halved", model, weights, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="no fp32 weights"):
        MEGATRON.read(tmp_path / "halved", model)


def write_dcp(
    folder: Path, weights: Mapping[str, Tensor], nested: bool, more: Mapping[str, Tensor]
) -> None:
    states = {
        name: {q: p * factor for q, factor in MOMENTS.items()} | {"step": torch.tensor(3.0)}
        for name, p in weights.items()
    }
    for key, value in more.items():
        name, _, quantity = key.rpartition(".")
        states[name][quantity] = value
    flat = {f"optimizer.state.{n}.{q}": v for n, one in states.items() for q, v in one.items()}
    whole = {"model": weights, "optim": {"state": states}} if nested else {**weights, **flat}
    dcp.save(whole, checkpoint_id=folder, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("nested", [True, False])
def test_no_tensor_of_dcp_is_dropped(
    nested: bool, model: RecipeModel, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    write_dcp(tmp_path / "whole", weights, nested, {})
    check(DCP.read(tmp_path / "whole", model), weights)
    for name, shape in (("lm_head", (320, 64)), ("model.layers.2.input_layernorm", (64,))):
        more = weights | {f"{name}.weight": torch.ones(shape)}
        write_dcp(tmp_path / name, more, nested, {})
        with pytest.raises(CheckpointError, match=f"of {name}.weight"):
            DCP.read(tmp_path / name, model)
    maximum = {"model.norm.weight.max_exp_avg_sq": torch.ones(64)}
    write_dcp(tmp_path / "amsgrad", weights, nested, maximum)
    with pytest.raises(CheckpointError, match=r"max_exp_avg_sq .* AdamW does not keep"):
        DCP.read(tmp_path / "amsgrad", model)


def test_the_tracker_is_a_small_regular_file(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("5" + " " * 1000)
    with pytest.raises(CheckpointError, match="more than 100 bytes"):
        iteration_folder(tmp_path)
    (tmp_path / TRACKER).rename(tmp_path / "other")
    (tmp_path / TRACKER).symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match="no regular file"):
        iteration_folder(tmp_path)
