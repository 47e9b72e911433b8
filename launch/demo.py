"""`make demo`: train a small llama on this machine's own Python library, then fine-tune it.

The model, recipes/tiny/llama-bytes.yaml:

1. `dmt launch`: 2 processes, DeepSpeed ZeRO-2, fp32, byte-level tokens
2. reload the exported model with plain transformers, in this one process: the loss is below
   the unigram entropy of the text (the model learned more than letter frequencies), and the
   reloaded model has the same validation loss
3. `dmt launch` the same recipe for its first steps with megatron-core (tensor and sequence
   parallel): the same losses
4. `dmt rehearse`: the parity table of four layouts

Its fine-tune on chats with LoRA, recipes/tiny/llama-lora.yaml:

5. `dmt data show`: a row of conversations; only the answers are trained
6. `dmt launch`: adapters on the exported model of step 1
7. load the exported adapters with plain PEFT: the loss of held-out answers has fallen, and it
   is that of the training run; print the model's own answers, before and after
8. `dmt launch` the first steps with megatron-core again: the same losses
"""

import json
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import toolkit  # noqa: F401 - first: it has the libraries below complain of nothing

# isort: split
import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from toolkit.batch import IGNORE_INDEX
from toolkit.data.batches import evaluation_batches
from toolkit.data.build import TrainingData, build_data
from toolkit.intake.load import load_recipe

PRETRAIN = Path("recipes/tiny/llama-bytes.yaml")
FINETUNE = Path("recipes/tiny/llama-lora.yaml")
RUNS = Path("runs/demo")
LEARNED = 0.8
"""A loss has fallen if it is at most this share of what it is compared with."""
SAME = 1e-5
"""Largest relative difference between the two validation losses (fp32)."""
SAME_STEPS = 1e-4
"""Largest relative difference between losses of the first steps: rounding grows with them."""
FIRST_STEPS = 20
MEGATRON = (
    "parallel.engine=megatron", "parallel.tensor=2", f"training.steps={FIRST_STEPS}",
    "evaluation.every_steps=null", "checkpoint.every_steps=null", "checkpoint.export=false",
)  # fmt: skip
"""What the runs of the first steps change of the recipe: the layout, and what comes later."""
REHEARSED = "zero2,zero3,megatron-tp2-sp,megatron-tp2-zero1"
ASKED = 3
"""Held-out questions that the model answers."""
ANSWER_BYTES = 100
TEMPERATURE = 0.3
END_OF_TURN = "<|im_end|>"
"""Of the recipe's chat template."""


class Question(NamedTuple):
    """A question that was not trained on."""

    text: str
    docstring: str
    tokens: Tensor
    """int64 [1, length]: the question in the chat template, up to the answer."""


def main() -> int:
    console = Console()
    logging.disable_progress_bar()
    # PEFT uses a name that transformers has changed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    shutil.rmtree(RUNS, ignore_errors=True)
    good = [*pretrain(console), *finetune(console, RUNS / "zero2" / "export")]
    console.print(f"everything is in {RUNS}: one run directory per layout, with recipe.yaml")
    console.print("  plan.json metrics.jsonl events.jsonl logs/ wandb/ checkpoints/ export/")
    return 0 if all(good) else 1


def pretrain(console: Console) -> Iterator[bool]:
    """Steps 1 to 4; whether each check passed."""
    started = time.perf_counter()
    run = launch(console, PRETRAIN, "zero2")
    seconds = time.perf_counter() - started
    data = load_data(run)
    model = AutoModelForCausalLM.from_pretrained(run / "export").eval()
    yield check_training(
        console,
        run,
        f"demo: {seconds:.0f} s of training",
        "nats per byte",
        ("unigram entropy of the text", data.unigram_entropy_nats()),
        ("exported model in transformers", validation_loss(run, data, model)),
    )
    megatron = launch(console, PRETRAIN, "megatron", *MEGATRON)
    yield check_first_steps(console, "the same recipe, the same losses", run, megatron)
    dmt(console, "rehearse", str(PRETRAIN), "--layouts", REHEARSED)


def finetune(console: Console, base: Path) -> Iterator[bool]:
    """Steps 5 to 8; whether each check passed."""
    dmt(console, "data", "show", str(FINETUNE), "--samples", "1")
    from_base = (f"model.hub={base}", "model.init=pretrained")
    run = launch(console, FINETUNE, "lora-zero2", *from_base)
    data = load_data(run)
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    before, said_before = validation_loss(run, data, model), answers(model, data)
    adapter = run / "export" / "adapter_model.safetensors"
    model = PeftModel.from_pretrained(model, adapter.parent).eval()
    yield check_training(
        console,
        run,
        f"chat fine-tune: {adapter.name}, {adapter.stat().st_size / 1000:.0f} kB",
        "nats per byte of held-out answers",
        ("the model before, in transformers", before),
        ("exported adapter in PEFT", validation_loss(run, data, model)),
    )
    print_answers(console, data, said_before, answers(model, data))
    megatron = launch(console, FINETUNE, "lora-megatron", *from_base, *MEGATRON)
    yield check_first_steps(console, "the same fine-tune, the same losses", run, megatron)


def launch(console: Console, recipe: Path, name: str, *changes: str) -> Path:
    """`dmt launch`; the run directory."""
    overrides = [word for text in changes for word in ("--set", text)]
    dmt(console, "launch", str(recipe), "--run-dir", str(RUNS / name), *overrides)
    return RUNS / name


def dmt(console: Console, *words: str) -> None:
    """Run a `dmt` command; the demo ends where one fails."""
    console.print(f"[bold]$ dmt {shlex.join(words)}[/bold]")
    code = subprocess.run([sys.executable, "-m", "toolkit.cli.main", *words]).returncode
    if code:
        sys.exit(code)


def check_training(
    console: Console,
    run: Path,
    title: str,
    unit: str,
    compared: tuple[str, float],
    reloaded: tuple[str, float],
) -> bool:
    """Did the model learn, and is the export what was trained?

    `compared` names a loss that is clearly higher than that of a model that has learned,
    `reloaded` the validation loss of the export.
    """
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    trained = [event["loss"] for event in events if event["kind"] == "evaluation"][-1]
    (comparison, higher), (name, exported) = compared, reloaded
    difference = abs(exported - trained) / trained

    table = Table(title=title, title_justify="left")
    table.add_column(unit)
    table.add_column("", justify="right")
    table.add_row(comparison, f"{higher:.4f}")
    table.add_row("validation loss, 2 ranks, ZeRO-2", f"{trained:.6f}")
    table.add_row(f"validation loss, {name}", f"{exported:.6f}")
    table.add_row("relative difference", f"{difference:.1e}")
    console.print(table)
    learned, same = trained < LEARNED * higher, difference < SAME
    if not learned:
        console.print(f"[red]FAILED: the loss is not clearly below: {comparison}")
    if not same:
        console.print("[red]FAILED: the export has another validation loss")
    return bool(learned and same)


def check_first_steps(console: Console, title: str, run: Path, megatron: Path) -> bool:
    """Do both runs have the same losses in their first steps?"""
    expected, found = first_losses(run), first_losses(megatron)
    table = Table(title=title, title_justify="left")
    table.add_column("layout")
    for step in expected:
        table.add_column(f"step {step}", justify="right")
    for name, losses in {"ZeRO-2": expected, "megatron TP2+SP": found}.items():
        table.add_row(name, *(f"{losses[step]:.6f}" for step in expected))
    console.print(table)
    largest = max(abs(found[step] - loss) / loss for step, loss in expected.items())
    if largest > SAME_STEPS:
        console.print(f"[red]FAILED: losses differ by {largest:.1e}")
    return largest <= SAME_STEPS


def first_losses(run: Path) -> dict[int, float]:
    """Logged losses of the first steps, by step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    return {line["step"]: line["loss"] for line in logged if line["step"] <= FIRST_STEPS}


def load_data(run: Path) -> TrainingData:
    """The data that the run trained on, from the cache."""
    recipe = load_recipe(run / "recipe.yaml")
    assert recipe.model.config is not None
    vocab_size = recipe.model.config["vocab_size"]
    return build_data(recipe.data, recipe.training, vocab_size=vocab_size, base=Path.cwd())


@torch.no_grad()
def validation_loss(run: Path, data: TrainingData, model: nn.Module) -> float:
    """Mean cross entropy (nats) of an exported model, by transformers, PEFT and torch alone."""
    recipe = load_recipe(run / "recipe.yaml")
    (validation,) = data.validation.values()
    batches = evaluation_batches(
        validation,
        recipe.training.global_batch_size,
        recipe.evaluation.batches,
        dp_rank=0,
        sizes=[recipe.training.global_batch_size],
    )
    total, tokens = 0.0, 0
    for batch in batches:
        # Positions that restart keep the conversations of a row apart.
        output = model(batch.input_ids, position_ids=batch.positions, use_cache=False)
        logits = output.logits.flatten(0, 1)
        labels = batch.labels.flatten()
        total += cross_entropy(
            logits, labels, ignore_index=IGNORE_INDEX, reduction="sum"
        ).item()
        tokens += int((labels != IGNORE_INDEX).sum())
    return total / tokens


def held_out(data: TrainingData) -> Iterator[Question]:
    """Questions that were not trained on."""
    (validation,) = data.validation.values()
    for index in range(ASKED):
        chat = validation.documents(index)[0]
        asked = int(chat.trained.argmax())
        prompt, docstring = (
            data.tokenizer.decode(ids.tolist()) for ids in (chat.ids[:asked], chat.ids[asked:])
        )
        _, question, *_ = prompt.splitlines()
        yield Question(
            question.removesuffix(END_OF_TURN),
            docstring.partition(END_OF_TURN)[0],
            torch.from_numpy(chat.ids[:asked]).unsqueeze(0),
        )


def answers(model: PreTrainedModel | PeftModel, data: TrainingData) -> list[str]:
    """What the model says to the held-out questions, up to the end of its turn."""
    found = []
    for question in held_out(data):
        torch.manual_seed(0)
        tokens = model.generate(
            input_ids=question.tokens,
            attention_mask=torch.ones_like(question.tokens),
            max_new_tokens=ANSWER_BYTES,
            do_sample=True,
            temperature=TEMPERATURE,
            pad_token_id=data.tokenizer.eos_token_id,
        )
        said = data.tokenizer.decode(tokens[0, question.tokens.shape[1] :].tolist())
        turn, end, _ = said.partition(END_OF_TURN)
        found.append(turn + end)
    return found


def print_answers(
    console: Console, data: TrainingData, before: list[str], after: list[str]
) -> None:
    """The held-out questions, and the answers of the data and of the model."""
    for question, old, new in zip(held_out(data), before, after, strict=True):
        table = Table(title=question.text, title_justify="left", box=None, show_header=False)
        table.add_row("docstring", Text(question.docstring))
        table.add_row("before", Text(old.strip() or f"{len(old)} white-space characters"))
        table.add_row("after", Text(new.strip(), style="green"))
        console.print(table)
    for name, said in {"before": before, "after": after}.items():
        ended = sum(answer.endswith(END_OF_TURN) for answer in said)
        console.print(f"{name}: {ended} of {len(said)} answers end their turn")


if __name__ == "__main__":
    sys.exit(main())
