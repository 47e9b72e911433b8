"""The hand-written loop of transformers, PEFT and PyTorch's DDP that `overhead.py` compares
`dmt` with an adapter with.

    torchrun --nproc-per-node 2 benchmarks/bare_lora.py RUN_DIR STEPS DONE

Model, adapter, batches and AdamW are those of a run directory. Before the first step, DMT
gives the initial values and every batch, which then lie in memory; the steps are without
it. No validation, logging or checkpoint: the losses are written to DONE.losses at the end.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.adapters.weights import first_weights
from toolkit.data.batches import GlobalBatches
from toolkit.data.build import build_data
from toolkit.models import huggingface as hf
from toolkit.run.assignment import Assignment, read_assignment


def model_of(run: Assignment) -> torch.nn.Module:
    """The model with the adapter, and the first values that DMT gives both."""
    config = AutoConfig.for_model(**run.recipe.model.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=run.plan.attention)
    adapter = run.recipe.adapter
    lora = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=adapter.targets,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, lora)
    hf.fill(model.get_base_model(), first_weights(run.recipe, config))
    return model


def batches_of(run: Assignment, steps: int, rank: int, world: int) -> list[list[dict]]:
    """What the model is called with in each micro batch of each step."""
    training, micro = run.recipe.training, run.plan.layout.micro_batch
    data = build_data(run.recipe.data, training, vocab_size=None, base=Path.cwd())
    batches = GlobalBatches(data.train, data.order, data.batches)
    found = []
    for step in range(steps):
        ours = batches.micro_batches(step * training.global_batch_size, rank, [micro] * world)
        tokens = torch.tensor(sum(batch.tokens for batch in ours), dtype=torch.float32)
        dist.all_reduce(tokens)
        found.append([
            {
                "input_ids": batch.input_ids,
                "position_ids": batch.positions,
                "labels": batch.labels,
                "shift_labels": batch.labels,  # transformers would shift `labels` itself
                "num_items_in_batch": tokens / world,  # DDP takes the mean over ranks
            }
            for batch in ours
        ])  # fmt: skip
    return found


def main() -> None:
    folder, steps, done = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    run = read_assignment(folder, world)
    batches = batches_of(run, steps, rank, world)
    model = DistributedDataParallel(model_of(run))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wanted = run.recipe.optimizer
    optimizer = torch.optim.AdamW(
        trained,
        lr=wanted.learning_rate,
        betas=wanted.betas,
        eps=wanted.eps,
        weight_decay=wanted.weight_decay,
        fused=True,
    )
    losses = torch.zeros(steps)
    for step, (batch,) in enumerate(batches):  # no accumulation
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, wanted.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
        if rank == 0 and step in (0, steps - 1):
            done.with_suffix(".last" if step else ".first").touch()
    dist.all_reduce(losses)
    if rank == 0:
        done.with_suffix(".losses").write_text(json.dumps((losses / world).tolist()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
