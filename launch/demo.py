"""`make demo`: train a small llama on this machine's own Python library, then check it.

1. `dmt launch`: 2 processes, DeepSpeed ZeRO-2, fp32, byte-level tokens
2. reload the exported model with plain transformers, in this one process
3. compare: the loss is below the unigram entropy of the text (the model learned more
   than letter frequencies), and the reloaded model has the same validation loss
"""

import json
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

from toolkit.data.batches import evaluation_batches
from toolkit.data.build import TrainingData, build_data
from toolkit.engines.base import IGNORE_INDEX
from toolkit.recipe.load import load_recipe
from toolkit.recipe.schema import Recipe

RECIPE = Path("recipes/tiny/llama-bytes.yaml")
RUN = Path("runs/demo")
SAME = 1e-5
"""Largest relative difference between the two validation losses (fp32)."""


def main() -> int:
    console = Console()
    shutil.rmtree(RUN, ignore_errors=True)
    started = time.perf_counter()
    command = ["launch", str(RECIPE), "--run-dir", str(RUN)]
    console.print(f"[bold]$ dmt {' '.join(command)}[/bold]")
    code = subprocess.run([sys.executable, "-m", "toolkit.cli.main", *command]).returncode
    if code:
        return code
    seconds = time.perf_counter() - started

    recipe = load_recipe(RUN / "recipe.yaml")
    data = load_data(recipe)
    entropy = data.unigram_entropy_nats()
    events = [json.loads(line) for line in (RUN / "events.jsonl").read_text().splitlines()]
    trained = [event["loss"] for event in events if event["kind"] == "evaluation"][-1]
    reloaded = validation_loss(recipe, data, RUN / "export")
    difference = abs(reloaded - trained) / trained

    table = Table(title=f"demo: {seconds:.0f} s of training", title_justify="left")
    table.add_column("nats per byte")
    table.add_column("", justify="right")
    table.add_row("unigram entropy of the text", f"{entropy:.4f}")
    table.add_row("validation loss, 2 ranks, ZeRO-2", f"{trained:.6f}")
    table.add_row("validation loss, exported model in transformers", f"{reloaded:.6f}")
    table.add_row("relative difference", f"{difference:.1e}")
    console.print(table)
    console.print(f"everything is in {RUN}: recipe.yaml plan.json deepspeed.json metrics.jsonl")
    console.print("  events.jsonl logs/ wandb/ checkpoints/ export/")
    learned, same = trained < 0.8 * entropy, difference < SAME
    if not learned:
        console.print("[red]FAILED: the loss is not clearly below the unigram entropy")
    if not same:
        console.print("[red]FAILED: the exported model has another validation loss")
    return 0 if learned and same else 1


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
