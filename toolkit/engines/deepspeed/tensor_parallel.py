"""DeepSpeed's tensor-parallel layers in a transformers model, filled part by part.

The model is built without storage, `autotp.json` says which layers DeepSpeed's replace, and a
rank allocates and reads only its own rectangles. Everything else, the embedding too, is whole
on every rank of a tensor group, with the whole gradient.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from toolkit.adapters.huggingface import inject
from toolkit.adapters.lora import Lora
from toolkit.checkpoint.shards import block_shape, parameter_blocks
from toolkit.engines.deepspeed import autotp
from toolkit.errors import PlanError
from toolkit.models import huggingface as hf
from toolkit.models.families.tensors import Block
from toolkit.models.weights import WeightSource

_HEADS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads",
    "num_kv_heads", "all_head_size", "embed_dim",
)  # fmt: skip
"""Attributes of attention modules that count a rank's heads and their features."""
_OF_CONFIG = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Split:
    """How a rank's part of a parameter was cut."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    axis: int
    pieces: tuple[int, ...]
    """Sizes along the axis, of each of which every rank has an equal part."""

    def blocks(self, name: str, rank: int, degree: int) -> tuple[Block, ...]:
        """The checkpoint's rectangles that, stacked, are the part of `rank`."""
        (whole,) = parameter_blocks(name, self.shape)
        found, offset = [], 0
        for size in self.pieces:
            share = size // degree
            part = offset + rank * share, offset + (rank + 1) * share
            found.append(
                replace(whole, rows=part) if self.axis == 0 else replace(whole, columns=part)
            )
            offset += size
        return tuple(found)


class SplitLayers:
    """The parts of a model that one rank of a tensor group has."""

    def __init__(self, config: PretrainedConfig, group: dist.ProcessGroup) -> None:
        from deepspeed.module_inject.layers import set_autotp_mode

        set_autotp_mode(training=True)
        self.config, self.group = config.get_text_config(), group
        self.rank, self.degree = dist.get_rank(group), dist.get_world_size(group)
        self.plan = autotp.split_plan(config.model_type)
        self.splits: dict[str, Split] = {}
        """By parameter's name in the model."""

    def build(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        lora: Lora | None,
        weights: WeightSource,
    ) -> PreTrainedModel:
        """The model with this rank's parts of its layers, filled."""
        with init_empty_weights(include_buffers=False):
            model = hf.new_model(config, dtype)
        model.tie_weights()
        inject(model, lora)
        self._replace_layers(model)
        self._replace_head(model)
        allocate(model, device)
        self._fill(model, weights)
        return model.to(device)

    def _replace_layers(self, model: PreTrainedModel) -> None:
        """Give every layer that is split DeepSpeed's place, and its module fewer heads."""
        partial: set[str] = set()
        narrowed: dict[str, nn.Module] = {}
        for name, module in list(model.named_modules()):
            kind = self.plan.kind_of(name)
            if kind == autotp.PARTIAL:
                partial.add(name)
            elif kind is not None and isinstance(module, nn.Linear):
                self._replace(model, name, module, kind)
                parent = autotp.base_name(name).rpartition(".")[0]
                is_layer = parent.rpartition(".")[2].isdecimal()
                if not is_layer and kind in (autotp.COLUMN, autotp.QKV, autotp.GATE_UP):
                    narrowed[parent] = model.get_submodule(parent)
        if not self.splits:
            raise PlanError(
                f"parallel.tensor: nothing of {self.config.model_type} was split: its modules "
                "are not those of the transformers version that autotp.json was tested with"
            )
        for name, module in narrowed.items():
            self._count_heads(module)
            self._check_rest(name, module, partial)
        for name in partial:
            for parameter in model.get_submodule(name).parameters(recurse=False):
                parameter.partial_gradient = True

    def _check_rest(self, parent: str, module: nn.Module, partial: set[str]) -> None:
        """Refuse a parameter that is whole on every rank next to split heads or features:
        it would be other heads', or its gradient a part."""
        for name, _ in module.named_parameters(prefix=parent):
            owner = name.rpartition(".")[0]
            known = name in self.splits or owner in partial or f"{owner}.weight" in self.splits
            if not known and ".lora_" not in name:
                raise PlanError(
                    f"parallel.tensor: AutoTP would leave {name} whole, next to split heads",
                    fix="set parallel.tensor to 1, or parallel.model to megatron",
                )

    def _replace_head(self, model: PreTrainedModel) -> None:
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        tied = getattr(head, "weight", None) is getattr(embedding, "weight", None)
        if isinstance(head, nn.Linear) and autotp.splits_head(
            head.out_features, tied, self.degree
        ):
            name = next(name for name, module in model.named_modules() if module is head)
            self._replace(model, name, head, autotp.GATHERED)

    def _replace(self, model: nn.Module, name: str, layer: nn.Linear, kind: str) -> None:
        """Replace one linear layer."""
        from deepspeed.module_inject import layers

        rows, columns = layer.weight.shape
        shapes = {key: tuple(p.shape) for key, p in layer.named_parameters()}
        by_columns = kind in (autotp.ROW, autotp.ROW_OF_WHOLE)
        pieces = (columns,) if by_columns else self._pieces(kind, rows)
        if sum(pieces) != shapes["weight"][by_columns] or any(p % self.degree for p in pieces):
            raise PlanError(
                f"parallel.tensor: {self.degree} does not divide {name}, {pieces}",
                fix="use a smaller degree",
            )
        # Names would select special cases of DeepSpeed's sizes of parts.
        made: Any
        if kind == autotp.ROW:
            made = layers.LinearAllreduce(layer, self.group, name="")
        elif kind == autotp.ROW_OF_WHOLE:
            made = layers.LinearAllreduceWithReplicatedInput(layer, self.group, name="")
        elif len(pieces) > 1:
            made = layers.SubParamLinearLayer(layer, self.group, shape=(pieces, -1), name="")
        else:
            gathers = kind == autotp.GATHERED
            made = layers.LinearLayer(layer, self.group, name="", gather_output=gathers)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, made)
        for key, shape in shapes.items():
            if not (by_columns and key == "bias"):  # added once, after the sum
                self.splits[f"{name}.{key}"] = Split(shape, int(by_columns), pieces)

    def _pieces(self, kind: str, rows: int) -> tuple[int, ...]:
        """Outputs that are split each for itself."""
        if kind == autotp.GATE_UP:
            return rows // 2, rows // 2
        if kind == autotp.QKV:
            heads = self.config.num_attention_heads
            groups = getattr(self.config, "num_key_value_heads", None) or heads
            size = rows // (heads + 2 * groups)
            return heads * size, groups * size, groups * size
        return (rows,)

    def _count_heads(self, module: nn.Module) -> None:
        """Let a module count the heads that this rank has."""
        for name in _HEADS:
            if isinstance(count := getattr(module, name, None), int):
                setattr(module, name, self._part(name, count))
        if isinstance(config := getattr(module, "config", None), PretrainedConfig):
            own: Any = copy(config)
            for name in _OF_CONFIG:
                if isinstance(count := getattr(config, name, None), int):
                    setattr(own, name, self._part(name, count))
            module.config = own

    def _part(self, name: str, count: int) -> int:
        if count % self.degree:
            raise PlanError(f"parallel.tensor: {self.degree} does not divide {name} {count}")
        return count // self.degree

    @torch.no_grad()
    def _fill(self, model: nn.Module, weights: WeightSource) -> None:
        for name, parameter, blocks in self.placed(model):
            if name not in self.splits:
                weight = next(iter(blocks)).tensor if len(blocks) == 1 else name
                values = weights.read(weight, 0, parameter.numel())
                parameter.copy_(values.view_as(parameter))
                continue
            row = 0
            for block in blocks:
                rows = block_shape(block)[0]
                parameter[row : row + rows].copy_(weights.read_block(block))
                row += rows
        hf.fill_biases(model, weights)

    def placed(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Sequence[Block]]]:
        """Every parameter by its name in the model, and its rectangles."""
        names = (name for name, _ in model.named_parameters())
        for own, (name, parameter) in zip(names, hf.named_parameters(model), strict=True):
            split = self.splits.get(own)
            shape = getattr(parameter, "ds_shape", parameter.shape)
            yield (
                own,
                parameter,
                (
                    split.blocks(name, self.rank, self.degree)
                    if split
                    else parameter_blocks(name, shape)
                ),
            )

    def partial(self, model: nn.Module) -> Iterator[nn.Parameter]:
        """Parameters of which every rank of the group computes a part of the gradient."""
        return (one for one in model.parameters() if getattr(one, "partial_gradient", False))


def allocate(model: nn.Module, device: torch.device) -> None:
    """Replace parameters without storage by empty ones; those that are one stay one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    values = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
                    vars(made[id(parameter)]).update(vars(parameter))
                module._parameters[name] = made[id(parameter)]
