"""A loop with torchtitan's settings, which `gpu.py` compares `dmt` with.

    torchrun --nproc-per-node 1 benchmarks/titan_loop.py RUN_DIR STEPS DONE

torchtitan itself is not used: its choices are, on transformers' model, with the shape, batch,
AdamW and clipping of a run directory. FSDP2 on every layer and on the rest, weights gathered in
the recipe's precision, gradients reduced in fp32; every layer and the loss compiled; whole
logits, cross entropy in fp32; AdamW in one kernel. Recompute: none, as in the recipe, instead
of torchtitan's selective one. The data are random tokens that lie on the device.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.run.assignment import Assignment, read_assignment

LOGGED_EVERY = 10
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def sharded(assignment: Assignment, device: torch.device) -> nn.Module:
    """The model, compiled layer by layer and then sharded."""
    recipe = assignment.recipe
    config = AutoConfig.for_model(**recipe.model.config)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = DTYPES[recipe.training.precision]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model.train()


def train(assignment: Assignment, device: torch.device, steps: int, done: Path) -> None:
    """Train and mark the first and the last step."""
    recipe, layout = assignment.recipe, assignment.plan.layout
    model, settings = sharded(assignment, device), recipe.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), settings.learning_rate, settings.betas, settings.eps,
        settings.weight_decay, fused=True,
    )  # fmt: skip
    loss_of = torch.compile(mean_loss)
    vocabulary, length = recipe.model.config["vocab_size"], recipe.training.sequence_length
    shape = layout.gradient_accumulation, layout.micro_batch, length
    for step in range(1, steps + 1):
        rows = torch.randint(vocabulary, shape, device=device)
        total = torch.zeros((), device=device)
        for batch in rows:
            loss = loss_of(model(batch, use_cache=False).logits, batch) / len(rows)
            loss.backward()
            total += loss.detach()
        if settings.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, steps) or step % LOGGED_EVERY == 0:
            value = float(total)  # waits for the device
            print(f"step {step}: loss {value:.4f}", flush=True)
        if step in (1, steps):
            done.with_suffix(".first" if step == 1 else ".last").touch()


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token, in fp32."""
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def main() -> None:
    run, steps, done = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    on_gpu = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    )
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(read_assignment(run, dist.get_world_size()), device, steps, done)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort a Python that shuts down


if __name__ == "__main__":
    main()
