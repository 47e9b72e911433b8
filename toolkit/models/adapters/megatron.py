"""Adapters of megatron-core's parallel linear layers.

A fused layer (query, key and value; gate and up) has the A of each of its projections stacked,
and every row of B is multiplied with the A·x of its own projection alone. Where the base's rows
are split over the tensor ranks, B's are too and A is whole on each. Where its columns are, A's
are too and B is whole. Where every rank holds the base whole, both are. Ranks communicate A·x,
`rank` values per token.

Without sequence parallel, the gradient of a replicated factor is complete on every rank: the
gradient of A·x is summed in the backward pass, and a replicated B gets the same A·x on each
rank. With sequence parallel a rank has only its positions' part of the gradient, and the
attribute `sequence_parallel` marks the factor for summation, as for a norm.

Experts get the tokens of all tensor ranks, and the sum over the ranks follows later, so their
branches communicate nothing. Where tensor parallel splits an expert, each rank has a part of
the gradient of a whole factor, and the same attribute marks it. Where an expert is whole on its
rank, no other tensor rank has its factors.
"""

import re
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor, nn
from torch.nn import functional

from toolkit.models.adapters.lora import BRANCH, Lora, is_of_expert
from toolkit.models.families.tensors import TensorMap
from toolkit.models.megatron.experts import GroupedExperts
from toolkit.models.megatron.model import GPTChunk
from toolkit.models.megatron.weights import tensor_place


class LoraBranch(nn.Module):
    """scaling · B·A·x of one linear layer, as this rank's part of the layer's output."""

    rows: Tensor
    """Where a row of `up` lies in `_matrix`: its row [rows of up, 1] and, below, its columns
    [rows of up, rank]."""
    columns: Tensor

    def __init__(
        self, lora: Lora, tensor: TensorMap, base: nn.Module, *, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.scaling = lora.scaling
        self.dropout = lora.section.dropout
        self.sequence_parallel = sequence_parallel
        self.column_parallel = tensor.split == "rows"
        self.of_expert = is_of_expert(tensor)
        rank, parts = lora.section.rank, len(lora.parts(tensor))
        weight: Tensor = base.weight  # type: ignore[assignment]
        part_of_rows: list[int | None] = [0] * len(weight)
        if not self.of_expert:
            place = tensor_place(of_expert=False) if self.column_parallel else (0, 1)
            part_of_rows = lora.part_of_rows(tensor, *place)
        rows = [row for row, part in enumerate(part_of_rows) if part is not None]
        self.down = nn.Parameter(weight.new_empty(parts * rank, weight.shape[1]))
        self.up = nn.Parameter(weight.new_empty(len(rows), rank))
        self.replicated = tensor.split == "none"
        factors = {"rows": (self.up, 0), "columns": (self.down, 1), "none": (None, 0)}
        split, dim = factors[tensor.split]
        if split is not None:
            set_tensor_model_parallel_attributes(split, True, dim, 1)
        for whole in (factor for factor in (self.down, self.up) if factor is not split):
            if not self.of_expert:
                whole.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
            elif parallel_state.get_expert_tensor_parallel_world_size() > 1:
                whole.sequence_parallel = True  # type: ignore[attr-defined]
            else:  # no copy on another tensor rank, which the gradient norm would leave out
                set_tensor_model_parallel_attributes(whole, True, 0, 1)
        for factor in (self.down, self.up):
            factor.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
        self.outputs = len(part_of_rows)
        self.fused = parts > 1 or len(rows) < self.outputs
        """Whether a row of `up` uses only a part of A·x, or `up` lacks rows of the output."""
        if self.fused:
            part = torch.tensor([one for one in part_of_rows if one is not None])
            places = torch.tensor(rows)[:, None], part[:, None] * rank + torch.arange(rank)
            self.register_buffer("rows", places[0].to(weight.device), persistent=False)
            self.register_buffer("columns", places[1].to(weight.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[positions, batch, in] → [positions, batch, out], each as the base layer has it."""
        hidden = functional.linear(self._dropped(x), self.down)
        if self.replicated or self.of_expert:
            return functional.linear(hidden, self._matrix()) * self.scaling
        if self.column_parallel:
            spread = gather_from_sequence_parallel_region
            whole = copy_to_tensor_model_parallel_region
        else:
            spread = reduce_scatter_to_sequence_parallel_region
            whole = reduce_from_tensor_model_parallel_region
        hidden = spread(hidden) if self.sequence_parallel else whole(hidden)
        return functional.linear(hidden, self._matrix()) * self.scaling

    def _matrix(self) -> Tensor:
        """B as a matrix [out, parts · rank], with 0 where the row belongs to another
        projection."""
        if not self.fused:
            return self.up
        matrix = self.up.new_zeros(self.outputs, self.down.shape[0])
        return matrix.index_put((self.rows, self.columns), self.up)

    def _dropped(self, x: Tensor) -> Tensor:
        """`x` after dropout: the same on all tensor ranks where they have the same x."""
        if not (self.dropout and self.training):
            return x
        same = (self.column_parallel or self.replicated) and not self.sequence_parallel
        with nullcontext() if same else get_cuda_rng_tracker().fork():
            return functional.dropout(x, self.dropout)


def attach(chunks: Sequence[GPTChunk], lora: Lora | None) -> None:
    """Add adapters, uninitialised, to the linear layers of this rank's chunks. Does nothing
    without `lora`."""
    if lora is None:
        return
    for tensor in lora.tensors:
        template = re.escape(tensor.name.removesuffix(".weight"))
        name = re.compile(re.sub(r"\\{(layer|expert)\\}", r"\\d+", template))
        for chunk in chunks:
            for path, base in [*chunk.named_modules()]:
                if name.fullmatch(path):
                    sequence = chunk.config.sequence_parallel
                    branch = LoraBranch(lora, tensor, base, sequence_parallel=sequence)
                    base.add_module(BRANCH, branch)
                    base.register_forward_hook(_add_branch)
                    experts = chunk.get_submodule(path.partition(".local_experts.")[0])
                    if isinstance(experts, GroupedExperts):
                        layer = path.rpartition(".")[2]
                        experts.low_rank.setdefault(layer, []).append(branch)


def _add_branch(
    base: nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """The output and bias of one of megatron-core's linear layers, with its adapter's part."""
    branch = base.get_submodule(BRANCH)
    return output[0] + branch(inputs[0]), output[1]
