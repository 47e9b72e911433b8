"""What ranks of test_import_formats.py do: train with megatron-core alone, save, and train on.

Its GPTModel, schedule, optimizer and `dist_checkpointing`, called as Megatron-LM does; of DMT's
engines only what lets megatron-core run on a CPU.
"""

import argparse
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.e2e.deepspeed_saver import FURTHER, SAVED_AT
from tests.e2e.foreign_savers import MegatronCase
from toolkit.accelerate.samples import TrainingSamples
from toolkit.engines.distributed import join, leave
from toolkit.intake.load import load_recipe
from toolkit.layout import Layout
from toolkit.models.megatron import cpu
from toolkit.models.megatron.model import join_groups, leave_groups
from toolkit.recipe.schema import Recipe

# isort: split
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import (
    filesystem_async,
    state_dict_saver,  # noqa: F401 - before `cpu.redirect`: 0.19 imports it when it saves
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_state import (
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend


def save_all(
    project: Path, cases: Mapping[str, MegatronCase], out: Path
) -> dict[str, list[float]]:
    """Save every case after `SAVED_AT` steps; the losses of the steps after that, on the last
    stage."""
    os.chdir(project)
    join()
    losses = {}
    for name, case in cases.items():
        join_groups(Layout(**case.layout), seed=1)
        losses[name] = train(case, load_recipe(Path("recipe.yaml"), case.overrides), out / name)
        leave_groups()
    leave()
    for child in multiprocessing.active_children():
        child.kill()  # megatron-core's writer leaves a helper process behind
    filesystem_async._results_queue = None
    return losses


def build(case: MegatronCase, model: Mapping[str, Any]) -> GPTModel:
    """megatron-core's own model of this Hugging Face config."""
    config = TransformerConfig(
        num_layers=model["num_hidden_layers"], hidden_size=model["hidden_size"],
        ffn_hidden_size=model["intermediate_size"],
        num_attention_heads=model["num_attention_heads"],
        num_query_groups=model["num_key_value_heads"],
        normalization="RMSNorm", layernorm_epsilon=1e-6, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, bias_dropout_fusion=False, masked_softmax_fusion=False,
        bias_activation_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, use_cpu_initialization=True,
        tensor_model_parallel_size=case.layout.get("tp", 1),
        pipeline_model_parallel_size=case.layout.get("pp", 1),
        pipeline_dtype=torch.float32, batch_p2p_comm=False, calculate_per_token_loss=True,
    )  # fmt: skip
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=model["vocab_size"],
        max_sequence_length=model["max_position_embeddings"],
        pre_process=is_pipeline_first_stage(),
        post_process=is_pipeline_last_stage(),
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="rope",
        rotary_base=10000,
    )


def train(case: MegatronCase, recipe: Recipe, folder: Path) -> list[float]:
    """Train, and save on the way."""
    torch.manual_seed(1)
    assert recipe.model.config is not None
    model = build(case, recipe.model.config)
    distributed = case.sharding != ""
    buffers = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, grad_reduce_in_fp32=True
    )
    replica = DistributedDataParallel(model.config, buffers, model)
    cpu.redirect()
    section = recipe.optimizer
    arguments = OptimizerConfig(
        lr=section.learning_rate, weight_decay=section.weight_decay,
        adam_beta1=section.betas[0], adam_beta2=section.betas[1], adam_eps=section.eps,
        clip_grad=section.clip_grad_norm, use_distributed_optimizer=distributed,
        params_dtype=torch.float32,
    )  # fmt: skip
    with cpu.cuda_type_names():
        optimizer = get_megatron_optimizer(arguments, [replica], use_gloo_process_groups=False)
    for group in optimizer.param_groups:  # Megatron-LM's scheduler does
        group["weight_decay"] = section.weight_decay * group["wd_mult"]
    model.config.finalize_model_grads_func = finalize_model_grads
    samples, batch = TrainingSamples(recipe), recipe.training.global_batch_size
    losses = []
    for step in range(SAVED_AT + FURTHER):
        if step == SAVED_AT:
            save(folder, case.sharding, batch, replica, optimizer)
        rows = [samples[step * batch + number] for number in range(batch)]
        share = rows[get_data_parallel_rank() :: get_data_parallel_world_size()]
        losses.append(one_step(replica, optimizer, share))
    return losses[SAVED_AT:]


def one_step(replica: Any, optimizer: Any, rows: Sequence[Mapping[str, Tensor]]) -> float:
    """Loss of a step, on the last stage."""
    replica.zero_grad_buffer()
    optimizer.zero_grad()

    def loss(kept: Tensor, output: Tensor) -> Any:
        total = (output * kept).sum()
        return total, kept.sum().int(), {"sum": total.item(), "count": kept.sum().item()}

    def forward(iterator: Any, chunk: Any) -> Any:
        pair = [next(iterator), next(iterator)]
        inputs = torch.stack([row["input_ids"] for row in pair])
        labels = torch.stack([row["shift_labels"] for row in pair])
        length = inputs.shape[1]
        positions = torch.arange(length).expand_as(inputs)
        hidden = torch.ones(1, 1, length, length).triu(1).bool()
        output = chunk(inputs, positions, hidden, labels=labels.clamp(min=0))
        return output, partial(loss, labels >= 0)

    logged = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=iter(rows), model=[replica],
        num_microbatches=len(rows) // 2, seq_length=len(rows[0]["input_ids"]),
        micro_batch_size=2, forward_only=False,
    )  # fmt: skip
    with cpu.cuda_type_names():
        optimizer.step()
    return totals(logged)


def totals(logged: Sequence[Mapping[str, float]]) -> float:
    """The mean over all data-parallel ranks; 0 on a stage without a loss."""
    sums = torch.tensor([[one["sum"], one["count"]] for one in logged]).sum(0)
    if not logged:
        return 0.0
    dist.all_reduce(sums, group=get_data_parallel_group())
    return float(sums[0] / sums[1])


def save(folder: Path, sharding: str, batch: int, replica: Any, optimizer: Any) -> None:
    """What Megatron-LM's `save_checkpoint` writes."""
    metadata: dict[str, Any] = {"chained_optim_avoid_prefix": True}
    if sharding:
        metadata["distrib_optim_sharding_type"] = sharding
    weights = replica.module.sharded_state_dict(metadata=metadata)
    state = {
        "args": argparse.Namespace(
            consumed_train_samples=SAVED_AT * batch,
            global_batch_size=batch,
            params_dtype=torch.float32,
            attention_backend=AttnBackend.unfused,
        ),
        "checkpoint_version": 3.0,
        "iteration": SAVED_AT,
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, metadata=metadata),
        "content_metadata": metadata,
    }
    iteration = folder / f"iter_{SAVED_AT:07d}"
    if dist.get_rank() == 0:
        iteration.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    dist.barrier()
    saver = TorchDistSaveShardedStrategy("torch_dist", 1)
    dist_checkpointing.save(state, str(iteration), saver)
