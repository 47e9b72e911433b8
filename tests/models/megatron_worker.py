"""What every rank of test_megatron_parity.py and of the conversion tests does.

For each case: builds the real GPTModel in its layout, fills it, compares logits and per-token
losses with transformers, and where asked saves it with megatron-core's own checkpointing.
"""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.engines.distributed import join, leave
from toolkit.layout import Layout
from toolkit.models import huggingface as hf
from toolkit.models.families import megatron_model
from toolkit.models.families.tensors import Block
from toolkit.models.megatron import cpu
from toolkit.models.megatron import model as megatron
from toolkit.models.megatron.config import gpt_arguments, transformer_arguments
from toolkit.models.megatron.weights import fill, shards
from toolkit.models.pretrained import SafetensorsWeights
from toolkit.models.weights import is_correction_bias as is_bias

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import (
    filesystem_async,
    state_dict_saver,  # noqa: F401 - before `cpu.redirect`: 0.19 imports it when it saves
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import MoELayer

SEQUENCES, LENGTH = 2, 16
RESTARTING = torch.stack([torch.arange(LENGTH) % 5, torch.arange(LENGTH) % 11])
"""Positions of the losses; logits have 0, 1, 2, …"""

LATENTS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Transformer Engine's latent attention holds these norms in the linear layers behind them."""


@dataclass(frozen=True)
class Case:
    """One model in one layout."""

    name: str
    folder: str
    """The Hugging Face folder."""
    layout: dict[str, Any]
    load: str | None = None
    """Fill from this Megatron iteration folder, by megatron-core, instead of safetensors."""
    save: str | None = None
    """Save there with megatron-core."""


def tokens_of(vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(vocabulary, (SEQUENCES, LENGTH + 1), generator=generator)


@torch.no_grad()
def reference(folder: str, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' logits [sequences, length, vocabulary] and losses per token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config._experts_implementation = "eager"
    logits = model.eval()(input_ids=tokens[:, :-1], use_cache=False).logits
    # With a mask: otherwise transformers isolates what it takes for documents.
    restarted = model(
        input_ids=tokens[:, :-1],
        position_ids=RESTARTING,
        attention_mask=torch.ones_like(RESTARTING),
        use_cache=False,
    ).logits
    losses = cross_entropy(restarted.transpose(1, 2), tokens[:, 1:], reduction="none")
    return logits, losses


@torch.no_grad()
def outputs(chunks: list[megatron.GPTChunk], tokens: Tensor, *, losses: bool) -> Tensor | None:
    """Logits (the whole vocabulary) or losses per token on the last stage, None elsewhere."""
    inputs = tokens[:, :-1].contiguous()
    found: list[Tensor] = []

    def forward(_: object, chunk: megatron.GPTChunk) -> Any:
        labels = tokens[:, 1:].contiguous() if losses else None
        output = chunk(inputs, RESTARTING if losses else None, None, labels=labels)

        def keep(value: Tensor, non_loss_data: bool = False) -> Any:  # noqa: ARG001
            found.append(value)
            return value.sum(), torch.tensor(1), {}

        return output, keep

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[None] * len(chunks),
        model=chunks,
        num_microbatches=1,
        seq_length=LENGTH,
        micro_batch_size=SEQUENCES,
        forward_only=True,
    )
    if not found:
        return None
    if losses:
        return found[0]
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(found[0]) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, found[0].contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def shares_read(source: SafetensorsWeights) -> list[float]:
    """The share of the model's weights in each rectangle that is read from now on."""
    total = sum(prod(shape) for name, shape in source.shapes.items() if not is_bias(name))
    reads: list[float] = []

    def read_block(block: Block, read: Callable[[Block], Tensor] = source.read_block) -> Tensor:
        if not is_bias(block.tensor):  # which every rank reads
            reads.append(len(block.row_numbers) * len(block.column_numbers) / total)
        return read(block)

    source.read_block = read_block  # type: ignore[method-assign]
    return reads


def sharded(chunk: megatron.GPTChunk) -> dict[str, Any]:
    """megatron-core's description of the chunk, with the names that its own layers have."""
    own = get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map
    of_dense = {ours: name for ours, name in own.items() if "mlp" in ours}
    for layer in chunk.decoder.layers:
        keys = own if not chunk.config.multi_latent_attention else of_dense | LATENTS
        if isinstance(layer.mlp, MoELayer):
            keys = {ours: name for ours, name in keys.items() if ours not in of_dense}
        layer.submodules_config.sharded_state_dict_keys_map = keys
    state: dict[str, Any] = chunk.sharded_state_dict()
    return state


def run(case: Case) -> dict[str, float]:
    """Largest differences from transformers, on the last stage; empty elsewhere."""
    layout = Layout(**case.layout)
    config = AutoConfig.from_pretrained(case.folder).to_dict()
    described = megatron_model(config)
    vocabulary = described.gpt["vocab_size"]
    cpu.redirect()
    megatron.join_groups(layout, seed=1)
    chunks = megatron.build_chunks(
        described,
        transformer_arguments(described, layout, "fp32"),
        gpt_arguments(described, layout),
        layout,
    )
    reads: list[float] = []
    state = {"": chunks[0]} if len(chunks) == 1 else dict(enumerate(chunks))
    if case.load is None:
        source = hf.pretrained_weights(
            Path(case.folder), AutoConfig.from_pretrained(case.folder)
        )
        for shard in shards(chunks, described):
            shard.parameter.data.fill_(float("nan"))  # what is not filled would show
        reads = shares_read(source)
        fill(chunks, described, source)
    else:
        for chunk in state.values():
            strategy = TorchDistLoadShardedStrategy()
            wanted = {"model": sharded(chunk)}
            loaded = dist_checkpointing.load(wanted, case.load, strategy)
            chunk.load_state_dict(loaded["model"])
    for chunk in chunks:
        chunk.eval()
    tokens = tokens_of(vocabulary)
    logits = outputs(chunks, tokens, losses=False)
    losses = outputs(chunks, tokens, losses=True)
    if case.save is not None:
        if dist.get_rank() == 0:
            Path(case.save).mkdir(parents=True)
        dist.barrier()
        saver = TorchDistSaveShardedStrategy("torch_dist", 1)
        (chunk,) = chunks
        dist_checkpointing.save({"model": sharded(chunk)}, case.save, saver)
    read = torch.tensor(sum(reads))
    dist.all_reduce(read)
    result = {}
    if logits is not None and losses is not None:
        expected, expected_losses = reference(case.folder, tokens)
        result = {
            "logits": (logits[..., :vocabulary] - expected).abs().max().item(),
            "losses": (losses - expected_losses).abs().max().item(),
            "spread": expected.std().item(),
            "read": read.item() if layout.dp == 1 and case.load is None else 1.0,
        }
    megatron.leave_groups()
    return result


def run_all(cases: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What `run` finds on this rank for each case, by name."""
    join()
    found = {case["name"]: run(Case(**case)) for case in cases}
    leave()
    # megatron-core's writer leaves a helper process behind.
    for child in multiprocessing.active_children():
        child.kill()
    filesystem_async._results_queue = None
    return found
