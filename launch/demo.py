"""`make demo`: train a small llama on this machine's own Python library, then check it.

1. `dmt launch`: 2 processes, DeepSpeed ZeRO-2, fp32, byte-level tokens
2. reload the exported model with plain transformers, in this one process: the loss is below
   the unigram entropy of the text (the model learned more than letter frequencies), and the
   reloaded model has the same validation loss
3. `dmt launch` the same recipe for its first steps with megatron-core (tensor and sequence
   parallel), and with megatron-core's model under DeepSpeed's ZeRO: the same losses
4. `dmt rehearse`: the parity table of five layouts
"""

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from toolkit.batch import IGNORE_INDEX
from toolkit.data.batches import evaluation_batches
from toolkit.data.build import TrainingData, build_data
from toolkit.intake.load import load_recipe
from toolkit.recipe.schema import Recipe

RECIPE = Path("recipes/tiny/llama-bytes.yaml")
RUNS = Path("runs/demo")
SAME = 1e-5
"""Largest relative difference between the two validation losses (fp32)."""
SAME_STEPS = 1e-4
"""Largest relative difference between losses of the first steps: rounding grows with them."""
FIRST_STEPS = 20
MEGATRON = {
    "megatron TP2+SP": ("parallel.engine=megatron",),
    "megatron TP2+SP × ZeRO-2": ("parallel.model=megatron", "cluster.gpus_per_node=4"),
}
"""Further layouts of the recipe, by what they change; all of them run in tensor parallel 2."""
REHEARSED = "ddp,zero2,zero3,megatron-tp2-sp,megatron-tp2-zero1"


def main() -> int:
    console = Console()
    shutil.rmtree(RUNS, ignore_errors=True)
    started = time.perf_counter()
    first = RUNS / "zero2"
    dmt(console, "launch", str(RECIPE), "--run-dir", str(first))
    seconds = time.perf_counter() - started
    runs = {"ZeRO-2": first}
    for number, (name, changes) in enumerate(MEGATRON.items(), 1):
        runs[name] = RUNS / f"megatron-{number}"
        sets = [*changes, "parallel.tensor=2", f"training.steps={FIRST_STEPS}"]
        sets += ["evaluation.every_steps=null", "checkpoint.every_steps=null"]
        sets += ["checkpoint.export=false"]
        overrides = [word for text in sets for word in ("--set", text)]
        dmt(console, "launch", str(RECIPE), "--run-dir", str(runs[name]), *overrides)
    good = [
        check_training(console, first, seconds),
        check_first_steps(console, runs),
    ]
    dmt(console, "rehearse", str(RECIPE), "--layouts", REHEARSED)
    console.print(f"everything is in {RUNS}: one run directory per layout, with recipe.yaml")
    console.print("  plan.json metrics.jsonl events.jsonl logs/ wandb/ checkpoints/ export/")
    return 0 if all(good) else 1


def dmt(console: Console, *words: str) -> None:
    """Run a `dmt` command; the demo ends where one fails."""
    console.print(f"[bold]$ dmt {shlex.join(words)}[/bold]")
    code = subprocess.run([sys.executable, "-m", "toolkit.cli.main", *words]).returncode
    if code:
        sys.exit(code)


def check_training(console: Console, run: Path, seconds: float) -> bool:
    """Did the model learn, and is its export the model that was trained?"""
    recipe = load_recipe(run / "recipe.yaml")
    data = load_data(recipe)
    entropy = data.unigram_entropy_nats()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    trained = [event["loss"] for event in events if event["kind"] == "evaluation"][-1]
    reloaded = validation_loss(recipe, data, run / "export")
    difference = abs(reloaded - trained) / trained

    table = Table(title=f"demo: {seconds:.0f} s of training", title_justify="left")
    table.add_column("nats per byte")
    table.add_column("", justify="right")
    table.add_row("unigram entropy of the text", f"{entropy:.4f}")
    table.add_row("validation loss, 2 ranks, ZeRO-2", f"{trained:.6f}")
    table.add_row("validation loss, exported model in transformers", f"{reloaded:.6f}")
    table.add_row("relative difference", f"{difference:.1e}")
    console.print(table)
    learned, same = trained < 0.8 * entropy, difference < SAME
    if not learned:
        console.print("[red]FAILED: the loss is not clearly below the unigram entropy")
    if not same:
        console.print("[red]FAILED: the exported model has another validation loss")
    return learned and same


def check_first_steps(console: Console, runs: dict[str, Path]) -> bool:
    """Do all runs have the same losses in their first steps?"""
    losses = {name: first_losses(run) for name, run in runs.items()}
    expected, *others = losses.values()
    steps = sorted(expected)
    table = Table(title="the same recipe, the same losses", title_justify="left")
    table.add_column("layout")
    for step in steps:
        table.add_column(f"step {step}", justify="right")
    for name, found in losses.items():
        table.add_row(name, *(f"{found[step]:.6f}" for step in steps))
    console.print(table)
    largest = max(
        abs(o[step] - expected[step]) / expected[step] for o in others for step in steps
    )
    if largest > SAME_STEPS:
        console.print(f"[red]FAILED: losses differ by {largest:.1e}")
    return largest <= SAME_STEPS


def first_losses(run: Path) -> dict[int, float]:
    """Logged losses of the first steps, by step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    return {line["step"]: line["loss"] for line in logged if line["step"] <= FIRST_STEPS}


def load_data(recipe: Recipe) -> TrainingData:
    """The data that the run trained on, from the cache."""
    assert recipe.model.config is not None
    return build_data(
        recipe.data,
        sequence_length=recipe.training.sequence_length,
        global_batch_size=recipe.training.global_batch_size,
        seed=recipe.training.seed,
        vocab_size=recipe.model.config["vocab_size"],
        base=Path.cwd(),
    )


@torch.no_grad()
def validation_loss(recipe: Recipe, data: TrainingData, folder: Path) -> float:
    """Mean cross entropy (nats) of an exported model, by transformers and torch alone."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert data.validation is not None
    batches = evaluation_batches(
        data.validation,
        recipe.training.global_batch_size,
        recipe.evaluation.batches,
        dp_rank=0,
        dp_size=1,
        micro_batch_size=recipe.training.global_batch_size,
    )
    total, tokens = 0.0, 0
    for batch in batches:
        logits = model(batch.input_ids).logits.flatten(0, 1)
        labels = batch.labels.flatten()
        total += cross_entropy(
            logits, labels, ignore_index=IGNORE_INDEX, reduction="sum"
        ).item()
        tokens += int((labels != IGNORE_INDEX).sum())
    return total / tokens


if __name__ == "__main__":
    sys.exit(main())
