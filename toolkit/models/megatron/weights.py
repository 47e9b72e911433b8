"""Maps a rank's Megatron tensors to parts of Hugging Face tensors, and fills them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from toolkit.models import frozen as frozen_parameters
from toolkit.models.families import MegatronModel
from toolkit.models.families.tensors import Block, blocks
from toolkit.models.megatron.model import GPTChunk
from toolkit.models.weights import WeightSource

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"


@dataclass(frozen=True)
class Shard:
    """A parameter of this rank and the checkpoint rectangles that it consists of."""

    chunk: int
    name: str
    """The parameter's name inside its chunk."""
    parameter: nn.Parameter
    blocks: tuple[Block, ...]
    """Stacked, they are the parameter. Rows beyond them are padding."""
    replicated: bool
    """Every tensor-parallel rank holds the same."""
    shared: bool
    """A second copy of the embedding, on the last pipeline stage of a tied model."""
    expert: bool
    """Sharded by expert parallelism, not replicated over all data-parallel ranks."""


def shards(chunks: Sequence[GPTChunk], model: MegatronModel) -> Iterator[Shard]:
    """Every parameter of this rank's chunks."""
    maps = {tensor.name: tensor for tensor in model.tensors}
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            template, layer, expert = _numbered(chunk, name)
            shared = template == HEAD and chunk.share_embeddings_and_output_weights
            tensor = maps[EMBEDDING if shared else template]
            rank, degree = tensor_place(of_expert=expert is not None)
            parts = blocks(tensor, rank, degree, layer=layer, expert=expert)
            replicated = tensor.split == "none" and degree > 1
            yield Shard(
                index, name, parameter, tuple(parts), replicated, shared, expert is not None
            )


def _numbered(chunk: GPTChunk, name: str) -> tuple[str, int | None, int | None]:
    """The name of the map of a tensor, and the tensor's layer and expert in the whole model."""
    layer = expert = None
    if match := re.search(r"layers\.(\d+)\.", name):
        layer = get_transformer_layer_offset(chunk.config, chunk.vp_stage) + int(match[1])
        name = name.replace(match[0], "layers.{layer}.")
    if match := re.search(r"local_experts\.(\d+)\.", name):
        local = chunk.config.num_moe_experts // chunk.config.expert_model_parallel_size
        rank = parallel_state.get_expert_model_parallel_rank()
        expert = rank * local + int(match[1])
        name = name.replace(match[0], "local_experts.{expert}.")
    return name, layer, expert


def tensor_place(*, of_expert: bool) -> tuple[int, int]:
    """Rank and degree of the tensor parallelism that splits a parameter."""
    if of_expert:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


@torch.no_grad()
def fill(chunks: Sequence[GPTChunk], model: MegatronModel, weights: WeightSource) -> None:
    """Give every parameter its initial value. Collective.

    A rank reads only the rectangles that it holds. Parts that several ranks of a replica hold
    are read by one of them and broadcast, so a replica reads no byte twice.
    """
    embedding = None
    for shard in shards(chunks, model):
        if shard.name == EMBEDDING:
            embedding = shard.parameter
        if shard.shared:
            embedding = shard.parameter
            continue
        if not shard.replicated or parallel_state.get_tensor_model_parallel_rank() == 0:
            _write(shard, weights)
        if shard.replicated:
            source = parallel_state.get_tensor_model_parallel_src_rank()
            group = parallel_state.get_tensor_model_parallel_group()
            dist.broadcast(shard.parameter, source, group)
    _share_embedding(chunks[0], embedding)
    fill_buffers(chunks, model, weights)


@torch.no_grad()
def fill_buffers(
    chunks: Sequence[GPTChunk], model: MegatronModel, weights: WeightSource
) -> None:
    """Set the buffers to their fp32 values: `Float16Module` rounds them."""
    for buffer, block in buffers(chunks, model):
        buffer.data = buffer.float()
        buffer.copy_(weights.read_block(block))


def buffers(chunks: Sequence[GPTChunk], model: MegatronModel) -> Iterator[tuple[Tensor, Block]]:
    """The buffers of this rank's chunks that checkpoints hold. Every replica has them whole."""
    maps = {tensor.name: tensor for tensor in model.buffers}
    for chunk in chunks:
        for name, buffer in chunk.named_buffers():
            template, layer, _ = _numbered(chunk, name)
            if template in maps:
                (block,) = blocks(maps[template], 0, 1, layer=layer)
                yield buffer, block


def _write(shard: Shard, weights: WeightSource) -> None:
    """Fill one parameter from its rectangles. Padding is zero."""
    row = 0
    for block in shard.blocks:
        rows = len(block.row_numbers)
        shard.parameter[row : row + rows].copy_(weights.read_block(block))
        row += rows
    shard.parameter[row:].zero_()


def _share_embedding(chunk: GPTChunk, embedding: nn.Parameter | None) -> None:
    """Copy the first stage's embedding to the last stage's head in a tied model."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    tied = chunk.share_embeddings_and_output_weights
    if tied and stages > 1 and parallel_state.is_rank_in_embedding_group():
        assert embedding is not None, "the group holds the first and the last stage"
        group = parallel_state.get_embedding_group()
        dist.broadcast(embedding, dist.get_global_rank(group, 0), group)


def tensors_of(
    chunks: Sequence[GPTChunk], model: MegatronModel
) -> Iterator[tuple[nn.Parameter, set[str]]]:
    """Every parameter with the checkpoint tensors that it is made of."""
    for shard in shards(chunks, model):
        yield shard.parameter, {block.tensor for block in shard.blocks}


def freeze(chunks: Sequence[GPTChunk], model: MegatronModel, frozen: frozenset[str]) -> None:
    """Freeze the parameters that consist of these checkpoint tensors."""
    frozen_parameters.freeze(tensors_of(chunks, model), frozen)
    for chunk in chunks:
        if frozen and chunk.pre_process and chunk.config.recompute_granularity == "full":
            chunk.embedding.register_forward_hook(_let_recompute)


def _let_recompute(_: object, __: object, embedded: Tensor) -> None:
    """megatron-core's recompute is reentrant: layers whose input needs no gradient get none.

    So the output of a frozen embedding is marked as requiring a gradient.
    """
    if torch.is_grad_enabled():
        embedded.requires_grad_()


def saved_here(shard: Shard) -> bool:
    """Whether this rank saves the shard, among the tensor and pipeline ranks that hold it."""
    first = not shard.replicated or parallel_state.get_tensor_model_parallel_rank() == 0
    return first and not shard.shared


def copies(shard: Shard) -> tuple[int, int]:
    """The number of data-parallel ranks that hold the shard, and this one's index among
    them."""
    if shard.expert:
        return (
            parallel_state.get_expert_data_parallel_world_size(),
            parallel_state.get_expert_data_parallel_rank(),
        )
    return (
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
