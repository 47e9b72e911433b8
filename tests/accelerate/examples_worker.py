"""What every rank of the tests does: the two examples, one engine after the other."""

import contextlib
import io
import os
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from transformers import Trainer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import toolkit.accelerate
from toolkit.intake.load import load_recipe
from toolkit.recipe.schema import Recipe

EXAMPLES = Path(__file__).parents[2] / "launch" / "examples"
ENGINES = {
    "zero2": ["parallel.engine=deepspeed", "parallel.zero.stage=2"],
    "zero3": ["parallel.engine=deepspeed", "parallel.zero.stage=3"],
    "fsdp2": ["parallel.engine=fsdp", "parallel.zero.stage=3"],
}
BF16 = [*ENGINES["zero3"], "training.precision=bf16", "parallel.recompute=full"]
SWITCHES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def script(name: str) -> dict[str, Any]:
    """What an example defines; the scripts import their neighbour."""
    sys.path.insert(0, str(EXAMPLES))
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def finetuned(recipe: Recipe, _output: Path) -> tuple[str, str]:
    """What the own loop printed, and what its model became."""
    example = script("accelerate_loop")
    accelerator = toolkit.accelerate.prepare(recipe)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        example["train"](accelerator, recipe)
    (model,) = accelerator._models
    if recipe.training.precision == "bf16":
        assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    return printed.getvalue(), kind_of(model)


def with_trainer(recipe: Recipe, output: Path) -> tuple[str, str]:
    """What the Trainer printed, and what it trained."""
    example = script("hf_trainer")
    trained: list[str] = []
    step = Trainer.training_step

    def watched(trainer: Trainer, model: Module, *rest: Any) -> torch.Tensor:
        trained.append(kind_of(model))
        return step(trainer, model, *rest)

    Trainer.training_step = watched
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        example["train"](recipe, output)
    Trainer.training_step = step
    (kind,) = set(trained)
    return printed.getvalue(), kind


def kind_of(model: Module) -> str:
    """What shards a model, and how many layers of it are gathered one by one."""
    if hasattr(model, "zero_optimization_stage"):
        return f"zero{model.zero_optimization_stage()}"
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    return f"fsdp2 in {units} units" if units else type(model).__name__


def forget() -> None:
    """Let the next Accelerator start anew."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith(SWITCHES)]:
        del os.environ[name]


def both_examples(recipe_file: Path, output: Path) -> dict[str, Any]:
    """For each example and engine the losses, and what became of the model."""
    warnings.simplefilter("ignore")
    result: dict[str, Any] = {}
    runs = {
        **{("own loop", name): (finetuned, changes) for name, changes in ENGINES.items()},
        ("trainer", "zero3"): (with_trainer, ENGINES["zero3"]),
        ("own loop", "bf16"): (finetuned, BF16),
    }
    for (example, name), (run, changes) in runs.items():
        printed, kind = run(load_recipe(recipe_file, changes), output)
        losses = [float(loss) for loss in re.findall(r"^step .*loss (\S+)$", printed, re.M)]
        result[f"{example}, {name}"] = {"losses": losses, "kind": kind}
        forget()
    return result
