"""What every rank of test_lora.py does: train adapters, save them, continue elsewhere.

`reference` is what all of them are compared with: PEFT and torch in one process.
"""

import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.engines.parity_worker import (
    SEED,
    Case,
    global_batches,
    micro_batches,
    plain_loop,
    recipe,
    unmasked,
    write_state,
)
from toolkit.adapters.lora import Lora
from toolkit.adapters.weights import AdaptedWeights, LoraWeights
from toolkit.backend import BACKENDS
from toolkit.batch import IGNORE_INDEX
from toolkit.checkpoint.export import export
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState, SavedWeights
from toolkit.checkpoint.shards import whole_block
from toolkit.engines.base import Counters, Engine
from toolkit.engines.build import build_engine
from toolkit.engines.distributed import Ranks
from toolkit.engines.setup import EngineSetup
from toolkit.layout import Layout
from toolkit.models import huggingface as hf
from toolkit.models.weights import WeightSource
from toolkit.plan.planner import plan_recipe

STEPS = 6
RANK, ALPHA = 3, 5
PEFT_PREFIX = "base_model.model."


def adapter(**changes: Any) -> dict[str, Any]:
    """The recipe's `adapter`."""
    return {"rank": RANK, "alpha": ALPHA, "targets": "all-linear", **changes}


class NoZeros(LoraWeights):
    """First values with which both factors matter from the first step on."""

    def _whole(self, name: str) -> Tensor:
        return first_value(name, self.shapes[name])


def first_value(name: str, shape: tuple[int, ...]) -> Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        / 20
    )


def reference(case: Case, *, rate_of_b: float = 1e-3, **changes: Any) -> dict[str, Any]:
    """A plain loop over whole global batches; `changes` are of PEFT's LoraConfig."""
    wanted = recipe(case, world=1)
    config = hf.build_config(wanted.model)
    base = hf.empty_model(config, torch.device("cpu"))
    hf.fill(base, hf.weight_source(wanted.model, config, SEED))
    stated = {"target_modules": "all-linear", **changes}
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", **stated)
    model = get_peft_model(base, lora)
    trained = {short(n): p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(first_value(name, tuple(parameter.shape)))
    groups = [
        {"params": [parameter], "lr": rate_of_b if "lora_B" in name else 1e-3}
        for name, parameter in trained.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    curve = plain_loop(model, optimizer, STEPS)
    tensors = {name: parameter.detach() for name, parameter in trained.items()}
    return {**curve, "tensors": tensors}


def short(name: str) -> str:
    """A parameter's name as a checkpoint of DMT has it."""
    return name.removeprefix(PEFT_PREFIX).replace(".default", "")


def build(case: Case, ranks: Ranks, saved: SavedState | None = None) -> tuple[Engine, Layout]:
    """The engine of a case, built as the worker builds it: to start, or to continue."""
    wanted = recipe(case, ranks.world)
    plan = plan_recipe(wanted)
    config = hf.build_config(wanted.model)
    assert wanted.adapter is not None
    lora = Lora.of(wanted.adapter, config.to_dict())
    first: WeightSource = NoZeros(lora, SEED)
    if saved is not None:
        first = SavedWeights(saved, lora.shapes)
    weights = AdaptedWeights(hf.weight_source(wanted.model, config, SEED), first)
    rendered = BACKENDS[plan.engine].render(wanted, plan.layout)
    setup = EngineSetup.of(wanted, plan, rendered, ranks, config, weights)
    return build_engine(plan.engine, setup), plan.layout


def look(folder: str, case: Case, ranks: Ranks) -> dict[str, Any]:
    """All steps of a case, or after a checkpoint the second half, and what it saves."""
    saved = Path(case.resume_in) if case.resume_in else None
    state = SavedState(saved) if saved else None
    engine, layout = build(case, ranks, state)
    first = 0
    if saved is not None:
        for shard in engine.state():
            state.load(shard)
        manifest = Manifest.read(saved)
        first = manifest.step
        engine.set_counters(Counters(manifest.optimizer_steps, manifest.loss_scale))
    results = []
    for step, (inputs, labels) in enumerate(global_batches(STEPS)):
        if step < first:
            continue
        if step == STEPS // 2 and not first:
            half = write_state(case, ranks, engine, step, Path(folder) / case.name)
        batches = micro_batches(inputs, labels, ranks, layout)
        torch.manual_seed(step)
        results.append(engine.train_step(batches, unmasked(labels), 1e-3))
    end = write_state(case, ranks, engine, STEPS, Path(folder) / f"{case.name}-end")
    validation = engine.evaluate(batches).loss
    engine.close()
    return {
        "validation": validation,
        "end": end,
        "loss": [result.loss for result in results],
        "grad_norm": [result.grad_norm for result in results],
        "half": None if first else half,
        "tensors": tensors_of(end) if ranks.rank == 0 else None,
    }


def exported_losses(case: Case, checkpoint: Path, folder: Path) -> list[float]:
    """The loss of the last batch, by plain PEFT beside the base and by the merged model."""
    wanted = recipe(case, world=1)
    config = hf.build_config(wanted.model)
    base = hf.empty_model(config, torch.device("cpu"))
    hf.fill(base, hf.weight_source(wanted.model, config, SEED))
    export(checkpoint, folder / "peft")
    export(checkpoint, folder / "merged", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    models = PeftModel.from_pretrained(base, folder / "peft").eval(), merged
    *_, (inputs, labels) = global_batches(STEPS)
    with torch.no_grad():
        logits = [model(inputs).logits.flatten(0, 1) for model in models]
    assert (logits[0] - logits[1]).abs().max() <= 1e-5
    return [
        cross_entropy(one, labels.flatten(), ignore_index=IGNORE_INDEX).item() for one in logits
    ]


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint."""
    state = SavedState(checkpoint)
    blocks = {name: whole_block(name, shape) for name, shape in state.shapes.items()}
    return {name: state.read("weight", block) for name, block in blocks.items()}


def unmarked(folder: str, case: Case, ranks: Ranks) -> dict[str, Any]:
    """As `look`, but no factor is marked as one whose gradient is to be summed."""
    from toolkit.engines.megatron import engine

    attach = engine.attach

    def forget(chunks: Any, lora: Any) -> None:
        attach(chunks, lora)
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if ".lora." in name:
                    parameter.sequence_parallel = False

    with patch.object(engine, "attach", forget):
        return look(folder, case, ranks)


def dropped(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Losses of a few steps, and what this rank then has of the factors that every rank of its
    tensor group holds whole."""
    engine, layout = build(case, ranks)
    losses = []
    for step, (inputs, labels) in enumerate(global_batches(3)):
        batches = micro_batches(inputs, labels, ranks, layout)
        torch.manual_seed(step)
        losses.append(engine.train_step(batches, unmasked(labels), 1e-2).loss)
    whole = {
        name: parameter.detach().clone()
        for name, parameter in engine.replicated_weights()
        if ".lora." in name and not getattr(parameter, "tensor_model_parallel", False)
    }
    engine.close()
    return {"loss": losses, "whole": whole}
