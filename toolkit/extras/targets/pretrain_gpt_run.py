"""The other arguments of Megatron-LM's `pretrain_gpt.py`, without model and optimizer: batch,
schedule, data and intervals, and notes to the user.

Megatron-LM's arguments are those of core_v0.16.1.
"""

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal

from toolkit.engines.megatron.config import trained_config
from toolkit.errors import Problem
from toolkit.models.families import settings_of
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import (
    DataSection,
    LoggingSection,
    MegatronSource,
    OptimizerSection,
    Recipe,
    ScheduleSection,
)
from toolkit.targets.base import written
from toolkit.targets.facts import values_of

Arguments = Iterator[tuple[str, ...]]
"""Flags, each with its values."""

OPTIMIZER_KEYS: Mapping[str, str] = {
    "--lr": "optimizer.learning_rate",
    "--weight-decay": "optimizer.weight_decay",
    "--adam-beta1": "optimizer.betas[0]",
    "--adam-beta2": "optimizer.betas[1]",
    "--adam-eps": "optimizer.eps",
}
RUN_KEYS: Mapping[str, str] = {
    "--micro-batch-size": "training.micro_batch_size",
    "--global-batch-size": "training.global_batch_size",
    "--seq-length": "training.sequence_length",
    "--train-iters": "training.steps",
    "--seed": "training.seed",
}
"""Flags that are written with the value of the recipe."""

WSD_DECAYS = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}
"""`schedule.decay` → the value of `--lr-wsd-decay-style`."""


def run_problems(recipe: Recipe) -> Iterator[Problem]:
    """Parts of the run that `pretrain_gpt.py` cannot express."""
    model, optimizer, data = recipe.model, recipe.optimizer, recipe.data
    objective, adapter = recipe.training.objective, recipe.adapter
    no_steps = recipe.total_steps() is None
    other = "pretrain_gpt.py" not in optimizer.kind.elsewhere
    why = optimizer.kind.unlike.get("pretrain_gpt.py", f"it has no {optimizer.kind.title}")
    indexed = isinstance(data.sources[0], MegatronSource)
    kinds = [s.kind for s in data.validation_sources if not isinstance(s, MegatronSource)]
    # The setting, what the recipe has of it if that is refused, and what would be written.
    rows = (
        ("training.epochs", f"{recipe.training.epochs:g}" if no_steps else "",
         "null: it counts steps, training.steps or training.tokens"),
        ("training.objective", objective if objective != "pretrain" else "", "pretrain"),
        ("model.balance", model.balance and model.balance.kind,
         "null: its balancing losses are --moe-* arguments of its own"),
        ("model.freeze", ", ".join(model.freeze), "[]: it trains all parameters"),
        ("optimizer.groups", optimizer.groups and f"{len(optimizer.groups)} of them",
         "[]: it has no multipliers by name"),
        ("adapter", adapter and adapter.name, "null: it has no adapters"),
        ("optimizer.name", optimizer.name if other else "", f"adamw: {why}"),
        ("data.isolate_documents", "true" if data.isolate_documents else "",
         "false: its script resets masks at a token, not at a document"),
        ("data.packing", data.packing if data.packing != "none" else "",
         "none: documents are laid end to end"),
        ("training.batch_ramp", "a map" if recipe.training.batch_ramp else "",
         "null: with a ramp, its rates follow samples, not steps"),
        ("data.stages", data.stages and f"{len(data.stages)} stages",
         "[]: weights and length do not change"),
        ("data.validation.kind", ", ".join(kinds) if indexed else "",
         "megatron, as data.train: both are in Megatron's indexed format"),
    )  # fmt: skip
    following = [
        (key, value, f"{'cosine' if 'schedule' in key else 'null'}: no loss decides there")
        for key, value in recipe.follows_validation.items()
    ]
    for key, found, allowed in (*rows, *following):
        if found:
            instead = re.split("[:,]", allowed)[0]
            fix = f"set {key} to {instead}, or train with `dmt launch`"
            yield Problem(key, str(found), f"in Megatron-LM's pretrain_gpt.py, {allowed}", fix)


def run_values(recipe: Recipe, plan: Plan, keys: Mapping[str, str]) -> Arguments:
    """The flags of a table with the values of the run."""
    for flag, value in written(keys, values_of(recipe, plan)).items():
        yield flag, str(value)


def run_arguments(recipe: Recipe, plan: Plan) -> Arguments:
    """Arguments of everything that is neither model nor optimizer."""
    steps = recipe.total_steps()
    assert steps is not None, "refused by `run_problems`"
    yield from run_values(recipe, plan, RUN_KEYS)
    if recipe.model.init == "random":
        std = settings_of(trained_config(recipe.model))["initializer_range"]
        yield "--init-method-std", str(float(std))
    yield from schedule_arguments(recipe.schedule, recipe.optimizer, steps)
    yield from _tokenizer_arguments(recipe.data.tokenizer)
    yield from _data_arguments(recipe.data)
    # Without an interval DMT evaluates and saves at the end only, as Megatron-LM does when
    # the interval is the whole run. Its script needs both numbers in any case.
    yield "--eval-interval", str(recipe.evaluation.every_steps or steps)
    validates = recipe.data.validation is not None or recipe.data.validation_fraction > 0
    yield "--eval-iters", str(recipe.evaluation.batches if validates else 0)
    yield "--save-interval", str(recipe.checkpoint.every_steps or steps)
    yield from _logging_arguments(recipe.logging, recipe.name)


def schedule_arguments(
    schedule: ScheduleSection, optimizer: OptimizerSection, steps: int
) -> Arguments:
    """The learning rates of `toolkit.train.schedule`, the same at every step.

    Its warm-up is set to begin at our rate of the first step instead of its default 0, so it is
    one step shorter.
    """
    warmup = schedule.warmup(steps)
    before = max(warmup - 1, 0)
    yield "--min-lr", str(schedule.min_learning_rate)
    yield "--lr-warmup-iters", str(before)
    if before:
        yield "--lr-warmup-init", str(optimizer.learning_rate / warmup)
    yield "--lr-decay-style", "WSD" if schedule.name == "wsd" else schedule.name
    yield "--lr-decay-iters", str(steps)
    if schedule.name == "wsd":
        assert schedule.decay_steps is not None, "checked at load"
        yield "--lr-wsd-decay-style", WSD_DECAYS[schedule.decay]
        yield "--lr-wsd-decay-iters", str(min(schedule.decay_steps, steps - before))


def _tokenizer_arguments(tokenizer: str) -> Arguments:
    if tokenizer == "bytes":
        # Token ids below 256 and one more that ends a text.
        yield "--tokenizer-type", "NullTokenizer"
        yield "--vocab-size", "256"
    else:
        yield "--tokenizer-type", "HuggingFaceTokenizer"
        yield "--tokenizer-model", tokenizer


def _data_arguments(data: DataSection) -> Arguments:
    if not isinstance(data.train, MegatronSource):
        return
    if data.validation_sources:
        yield "--train-data-path", data.train.prefix
        yield "--valid-data-path", *(source.place for source in data.validation_sources)
    else:
        held_out = Decimal(str(data.validation_fraction))
        yield "--data-path", data.train.prefix
        yield "--split", f"{1 - held_out},{held_out},0"


def _logging_arguments(logging: LoggingSection, name: str) -> Arguments:
    yield "--log-interval", str(logging.every_steps)
    if logging.tensorboard:
        yield "--tensorboard-dir", f"runs/{name}/tensorboard"
    wandb = logging.wandb
    if wandb is not None and wandb.mode != "disabled":
        yield "--wandb-project", wandb.project
        yield "--wandb-exp-name", name
        yield "--wandb-save-dir", f"runs/{name}/wandb"
        if wandb.entity is not None:
            yield "--wandb-entity", wandb.entity


def run_notes(recipe: Recipe) -> Iterator[str]:
    """What the user must add, and what Megatron-LM does differently."""
    cluster, data = recipe.cluster, recipe.data
    yield (
        f"start it with: xargs torchrun --nnodes {cluster.nodes} --nproc-per-node "
        f"{cluster.gpus_per_node} pretrain_gpt.py < args.txt"
    )
    if cluster.gpu == "cpu":
        yield "Megatron-LM's script needs GPUs; this recipe is for CPUs"
    source = recipe.model.hub
    if recipe.model.init == "checkpoint":
        yield f"for the weights: dmt checkpoint export {recipe.model.checkpoint} MODEL, and"
        source = "MODEL"
    if rows := recipe.model.resize_embeddings:
        yield (
            f"for the new tokens: resize_token_embeddings({rows}) of {source} in transformers, "
            "saved as MODEL, and"
        )
        source = "MODEL"
    if recipe.model.init != "random":
        yield (
            "for the pretrained weights: dmt checkpoint export FOLDER DIR --to megatron, where "
            f"FOLDER is that of {source}, and add --load DIR --finetune"
        )
    else:
        yield "initial weights are Megatron-LM's own draw, not DMT's"
    if isinstance(data.train, tuple):
        weights = " ".join(
            f"{source.weight or source.epochs:g} PREFIX" for source in data.train
        )
        yield f"add --data-path {weights} and --split: in Megatron's own indexed format"
    elif not isinstance(data.train, MegatronSource):
        yield (
            "add --data-path PREFIX and --split: Megatron-LM reads only its own indexed "
            f"format, and data.train is {data.kind}"
        )
    yield "data order and held-out documents are Megatron-LM's own choice, not DMT's"
    if data.tokenizer_revision is not None:
        yield f"data.tokenizer_revision {data.tokenizer_revision}: pass a local folder of it"
    yield "add --save DIR for checkpoints, and --load DIR to resume from them"
    yield "not passed on: checkpoint.keep, checkpoint.resume, checkpoint.export"
    wandb = recipe.logging.wandb
    if wandb is not None and wandb.mode == "offline":
        yield "set WANDB_MODE=offline"
    if wandb is not None and wandb.tags:
        yield "not passed on: logging.wandb.tags"
    for name in ("mlflow", "trackio"):
        if getattr(recipe.logging, name) is not None:
            yield f"not passed on: logging.{name}"
