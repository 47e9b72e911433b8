"""What the processes of test_import_formats.py do: train with FSDP2 alone and save."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from tests.e2e.deepspeed_saver import FURTHER, SAVED_AT, loss_of
from toolkit.accelerate.samples import TrainingSamples
from toolkit.engines.distributed import join, leave
from toolkit.intake.load import load_recipe
from toolkit.models.huggingface import build_config
from toolkit.recipe.schema import Recipe


def new_model(recipe: Recipe) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(build_config(recipe.model)).float()


def save_fsdp(project: Path, out: Path) -> list[float]:
    """Save with torch, as torchtitan does, and as Accelerate does; the losses after that."""
    os.chdir(project)
    ranks = join()
    recipe = load_recipe(Path("recipe.yaml"))
    samples, section = TrainingSamples(recipe), recipe.optimizer
    model = new_model(recipe)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=section.learning_rate, betas=section.betas, eps=section.eps,
        weight_decay=section.weight_decay,
    )  # fmt: skip
    losses = []
    for step in range(SAVED_AT + FURTHER):
        if step == SAVED_AT:
            save_states(model, optimizer, out)
        rows = [samples[step * 8 + number] for number in range(8)]
        loss = loss_of(model, rows[ranks.rank :: ranks.world])
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), section.clip_grad_norm)
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks.world)
    leave()
    return losses[SAVED_AT:]


def save_states(model: Any, optimizer: Any, out: Path) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=out / "nested")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=flat)
    train_state = {"train_state": {"step": torch.tensor(SAVED_AT)}}
    dcp.save(weights | {"optimizer": states} | train_state, checkpoint_id=out / "flat")
    folder = out / "checkpoint-2"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_offload=False
    )
    PartialState(cpu=True)  # its log asks for the rank
    process = SimpleNamespace(process_index=dist.get_rank(), num_processes=2)
    save_fsdp_model(plugin, process, model, folder)
    save_fsdp_optimizer(plugin, process, optimizer, model, folder)
