"""The other arguments of Megatron-LM's `pretrain_gpt.py`, without model and optimizer: batch,
schedule, data and intervals, and notes to the user.

Megatron-LM's arguments are those of core_v0.16.1.
"""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from itertools import chain

from toolkit.engines.megatron.config import trained_config
from toolkit.errors import Problem
from toolkit.layout import Layout
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
    if recipe.total_steps() is None:
        yield Problem(
            "training.epochs",
            f"{recipe.training.epochs:g}",
            "in Megatron-LM, a number of steps",
            "set training.steps or training.tokens instead",
        )
    if recipe.training.objective != "pretrain":
        yield Problem(
            "training.objective",
            recipe.training.objective,
            "in Megatron-LM's pretrain_gpt.py, pretrain",
            "set training.objective to pretrain, or train with `dmt launch`",
        )
    if recipe.model.balance is not None:
        yield Problem(
            "model.balance",
            recipe.model.balance.kind,
            "in Megatron-LM, nothing: it defines its balancing losses by arguments of its own",
            "set model.balance to null and add --moe-* arguments, or train with `dmt launch`",
        )
    if recipe.model.freeze:
        yield Problem(
            "model.freeze",
            ", ".join(recipe.model.freeze),
            "in Megatron-LM, nothing: it trains all parameters",
            "remove model.freeze, or start the run with `dmt launch`",
        )
    if recipe.optimizer.groups:
        yield Problem(
            "optimizer.groups",
            f"{len(recipe.optimizer.groups)} of them",
            "in Megatron-LM's pretrain_gpt.py, nothing: it has no multipliers by name",
            "remove optimizer.groups, or start the run with `dmt launch`",
        )
    if recipe.optimizer.layer_decay is not None:
        yield Problem(
            "optimizer.layer_decay",
            f"{recipe.optimizer.layer_decay:g}",
            "in Megatron-LM's pretrain_gpt.py, nothing: it has no multipliers by layer",
            "remove optimizer.layer_decay, or start the run with `dmt launch`",
        )
    if recipe.adapter is not None:
        yield Problem(
            "adapter",
            recipe.adapter.name,
            "in Megatron-LM's pretrain_gpt.py, nothing: it has no adapters",
            "remove adapter, or start the run with `dmt launch`",
        )
    if "pretrain_gpt.py" not in (kind := recipe.optimizer.kind).elsewhere:
        reason = kind.unlike.get("pretrain_gpt.py", f"it has no {kind.title}")
        yield Problem(
            "optimizer.name",
            recipe.optimizer.name,
            f"in Megatron-LM's pretrain_gpt.py, adamw: {reason}",
            "set optimizer.name to adamw, or start the run with `dmt launch`",
        )
    yield from chain(_adaptive_problems(recipe), _data_problems(recipe.data))


def _adaptive_problems(recipe: Recipe) -> Iterator[Problem]:
    fix = "remove it, or start the run with `dmt launch`"
    for key, value in recipe.follows_validation.items():
        allowed = "in Megatron-LM, nothing that depends on a validation loss"
        yield Problem(key, value, allowed, fix)


def _data_problems(data: DataSection) -> Iterator[Problem]:
    if data.isolate_documents:
        yield Problem(
            "data.isolate_documents",
            "true",
            "in Megatron-LM, false: its script resets masks at a token, not at a document",
            "set data.isolate_documents to false, or train with `dmt launch`",
        )
    if data.packing != "none":
        yield Problem(
            "data.packing",
            data.packing,
            "in Megatron-LM's pretrain_gpt.py, none: documents are laid end to end",
            "set data.packing to none, or train with `dmt launch`",
        )
    if data.stages:
        yield Problem(
            "data.stages",
            f"{len(data.stages)} stages",
            "in Megatron-LM's pretrain_gpt.py, none: weights and length do not change",
            "remove data.stages, or train with `dmt launch`",
        )
    train, validation = data.train, data.validation
    if isinstance(train, MegatronSource) and not isinstance(
        validation, MegatronSource | tuple | None
    ):
        yield Problem(
            "data.validation.kind",
            validation.kind,
            "megatron, as data.train",
            "write both in Megatron's indexed format",
        )


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
    if isinstance(data.validation, MegatronSource):
        yield "--train-data-path", data.train.prefix
        yield "--valid-data-path", data.validation.prefix
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


def run_notes(recipe: Recipe, layout: Layout) -> Iterator[str]:
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
            f"for the pretrained weights: dmt convert {source} DIR "
            f"--vocab-multiple {layout.tp}, and add --load DIR --finetune"
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
