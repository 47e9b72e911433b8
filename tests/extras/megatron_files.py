"""A checkpoint as Megatron-LM writes it, of weights that the test knows."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from toolkit.extras.convert.checkpoint_keys import written_place
from toolkit.extras.convert.torch_dist import Writer
from toolkit.models.families import MegatronModel
from toolkit.models.families.base import Instance
from toolkit.models.families.tensors import blocks

REGISTERED = (
    "input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv",
    "pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip
MOMENTS = {"exp_avg": 2, "exp_avg_sq": 3}
"""Of each weight, so many times its value."""


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
    megatron: MegatronModel,
    weights: Mapping[str, Tensor],
    rows: int = 320,
    flat: int = 0,
    dtype: torch.dtype = torch.float32,
    extra: Mapping[str, Tensor] | None = None,
) -> None:
    """A checkpoint with so many rows of the vocabulary; the optimizer's states by name, or as
    flat buffers of so many tensor-parallel ranks."""
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
