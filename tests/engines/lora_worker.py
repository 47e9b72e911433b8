"""What every rank of test_lora.py does: train adapters, and save them.

`reference` is what all of them are compared with: PEFT and torch in one process.
"""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engines.parity_worker import (
    SEED,
    Case,
    curves,
    first_value,
    global_batches,
    loss_of,
    micro_batches,
    new_engine,
    plain_loop,
    plain_model,
    steps,
    write_state,
)
from toolkit.checkpoint.export import export
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import whole_block
from toolkit.engines.distributed import Ranks

STEPS = 8
RANK, ALPHA = 3, 5
PEFT_PREFIX = "base_model.model."


def adapter(**changes: Any) -> dict[str, Any]:
    """The recipe's `adapter`."""
    return {"rank": RANK, "alpha": ALPHA, "targets": "all-linear", **changes}


def reference(case: Case, *, rate_of_b: float = 1e-3, **changes: Any) -> dict[str, Any]:
    """A plain loop over whole global batches; `changes` are of PEFT's LoraConfig."""
    stated = {"r": RANK, "target_modules": "all-linear", **changes}
    lora = LoraConfig(lora_alpha=ALPHA, task_type="CAUSAL_LM", **stated)
    model = get_peft_model(plain_model(case), lora)
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
    """A parameter's name as a checkpoint of DMT has it. PEFT wraps a layer's experts twice."""
    name = name.removeprefix(PEFT_PREFIX).replace(".default", "")
    for wrapper, parameter in (
        ("experts.base_layer", "gate_up_proj"),
        ("experts", "down_proj"),
    ):
        name = name.replace(f"{wrapper}.lora_", f"experts.{parameter}.lora_")
    return name


def look(folder: str, case: Case, ranks: Ranks) -> dict[str, Any]:
    """All steps of a case, and what it saves."""
    engine, layout = new_engine(case, ranks, SEED)
    results = steps(engine, layout, ranks, 0, STEPS)
    end = write_state(case, ranks, engine, STEPS, Path(folder) / case.name)
    *_, last = global_batches(STEPS)
    validation = engine.evaluate(micro_batches(*last, ranks, layout)).loss
    engine.close()
    return {
        "validation": validation,
        "end": end,
        **curves(results),
        "tensors": tensors_of(end) if ranks.rank == 0 else None,
    }


def exported_losses(case: Case, checkpoint: Path, folder: Path) -> list[float]:
    """The loss of the last batch, by plain PEFT beside the base and by the merged model."""
    export(checkpoint, folder / "peft")
    export(checkpoint, folder / "merged", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    models = PeftModel.from_pretrained(plain_model(case), folder / "peft").eval(), merged
    *_, (inputs, labels) = global_batches(STEPS)
    with torch.no_grad():
        logits = [model(inputs).logits for model in models]
    assert (logits[0] - logits[1]).abs().max() <= 1e-5
    return [loss_of(model, inputs, labels) for model in models]


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint."""
    state = SavedState(checkpoint)
    blocks = {name: whole_block(name, shape) for name, shape in state.shapes.items()}
    return {name: state.read("weight", block) for name, block in blocks.items()}


def dropped(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Losses of a few steps, and what this rank then has of the factors that every rank of its
    tensor group holds whole."""
    engine, layout = new_engine(case, ranks, SEED)
    losses = curves(steps(engine, layout, ranks, 0, 3, 1e-2))["loss"]
    whole = {
        name: parameter.detach().clone()
        for name, parameter in engine.replicated_weights()
        if ".lora." in name and not getattr(parameter, "tensor_model_parallel", False)
    }
    engine.close()
    return {"loss": losses, "whole": whole}
