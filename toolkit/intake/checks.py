"""Rules over several settings. They run on a recipe whose settings are all valid by themselves.

What is legal in `parallel` is decided in `toolkit.plan.rules.legality` and, for the model at
hand, in `toolkit.plan.rules.models`, what a model config may contain in `toolkit.models`. Here
they are only called.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from toolkit.errors import PlanError, Problem, RecipeError
from toolkit.intake.data_rules import DATA_RULES
from toolkit.launchers import LAUNCHERS, listed
from toolkit.models.families.arguments import frequencies_limit, rope_type_of
from toolkit.models.model import check_config, read
from toolkit.models.routers import balance_problems
from toolkit.models.types import NOT_INITIALISED
from toolkit.objectives.preference import REFERENCE
from toolkit.plan.hardware.catalogue import Gpu, accelerator
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import context, kernels, legality
from toolkit.plan.rules import models as model_rules
from toolkit.plan.space import uneven_batch
from toolkit.recipe.schema import Recipe, ScheduleSection
from toolkit.recipe.words import settings
from toolkit.recipe.yaml_text import plain_text
from toolkit.text.dotted import get


def broken_rules(recipe: Recipe) -> Iterator[Problem]:
    """Every broken rule. The problems carry full dotted keys, without file and line."""
    for rule in RULES:
        yield from rule(recipe)
    config = recipe.model.config
    if config is not None and not check_config(config):
        for model_rule in MODEL_RULES:
            yield from model_rule(recipe, config)


def steps_with(recipe: Recipe, samples: int) -> int:
    """Optimizer steps of a run whose epoch has so many samples.

    Raises RecipeError if the schedule is longer. With `training.epochs` the number of steps is
    not known before.
    """
    steps = recipe.training.total_steps(samples)
    assert steps is not None
    if problems := [*_schedule_in(recipe.schedule, steps)]:
        raise RecipeError(problems)
    return steps


_RAMP, _OUTER = "training.batch_ramp", "parallel.outer"

# A setting counts where it is not at its default, and `KEY=VALUE` where it has this value.

ONLY_WITH: tuple[tuple[str, ...], ...] = (
    ("schedule.decay_steps", "schedule.name", "wsd"),
    ("schedule.decay", "schedule.name", "wsd"),
    ("schedule.plateau", "schedule.name", "plateau"),
    ("schedule.name=plateau", "evaluation.every_steps"),
    ("evaluation.patience", "evaluation.every_steps"),
    ("checkpoint.keep_best", "evaluation.every_steps"),
    ("checkpoint.keep_best", "checkpoint.every_steps"),
    ("parallel.balance=auto", "checkpoint.every_steps"),
    ("dpo", "training.objective", "dpo"),
    ("dpo.label_smoothing", "dpo.loss", "sigmoid"),
    ("orpo", "training.objective", "orpo"),
    ("model.checkpoint", "model.init", "checkpoint"),
    ("model.balance.coefficient", "model.balance.kind", "sequence_loss", "bias"),
    ("model.balance.bias_update", "model.balance.kind", "bias"),
    ("launch.elastic", "launch.launcher", *(n for n, one in LAUNCHERS.items() if one.elastic)),
)
"""Settings that matter only with another setting: that setting, and its values, any without."""
NEEDED_WITH = (
    ("schedule.decay_steps", "schedule.name", "wsd", "an integer ≥ 1"),
    ("model.hub", "model.init", "pretrained", "a hub id or folder"),
    ("model.checkpoint", "model.init", "checkpoint", "a checkpoint or a run directory"),
    ("model.balance.coefficient", "model.balance.kind", "sequence_loss", "e.g. 0.001"),
    ("model.balance.bias_update", "model.balance.kind", "bias", "e.g. 0.001"),
    ("parallel.zero.nvme_path", "parallel.zero.offload_optimizer", "nvme", "a folder"),
    ("parallel.zero.nvme_path", "parallel.zero.offload_parameters", "nvme", "a folder"),
)
"""Settings that a value of another setting needs: that setting, its value, what is needed."""
NOT_WITH = (
    ("schedule.warmup_ratio", "schedule.warmup_steps", ""),
    ("data.validation_fraction", "data.validation", ""),
    ("model.freeze", "adapter", ""),
    (_RAMP, "data.stages", ""),
    ("model.balance.kind=bias", "adapter", ": PEFT has no bias of experts"),
    ("parallel.balance=auto", "model.balance", ": its terms are divided by the planned rows"),
    *(
        (one, _OUTER, ": it depends on all samples, or on one run's validation losses")
        for one in (
            *("training.epochs", _RAMP, "data.stages", "schedule.name=plateau"),
            *("evaluation.patience", "parallel.balance=auto"),
        )
    ),
    ("parallel.zero.offload_optimizer=nvme", _OUTER, ""),
    ("parallel.zero.offload_parameters=nvme", _OUTER, ""),
)
"""Settings that exclude each other, and why."""


def _default(key: str) -> object:
    return settings()[key].schema.get("default")


def _shown(value: object) -> str:
    parts = value if isinstance(value, list) else [value]
    return "settings" if any(isinstance(one, dict) for one in parts) else plain_text(value)


def _chosen(stated: dict[str, Any], setting: str) -> tuple[str, Any]:
    """The key, and the value if it counts. Otherwise None."""
    key, _, word = setting.partition("=")
    value = get(stated, key)
    return key, None if value == _default(key) or word not in ("", value) else value


def _tables(recipe: Recipe) -> Iterator[Problem]:
    """The rules in `ONLY_WITH`, `NEEDED_WITH` and `NOT_WITH`."""
    stated = recipe.model_dump(mode="json")
    for setting, other, *words in ONLY_WITH:
        (key, value), there = _chosen(stated, setting), get(stated, other)
        if value is not None and (there not in (None, *words) if words else there is None):
            unset = plain_text(_default(key))
            switch = f"`{other}: {plain_text(there)}`"
            fix = f"remove it ({unset} where it comes from `extends`), or set {other} to "
            fix += listed(words) if words else "a number"
            yield Problem(key, f"{_shown(value)} with {switch}", f"{unset} with {switch}", fix)
    for key, other, word, allowed in NEEDED_WITH:
        if get(stated, other) == word and _chosen(stated, key)[1] is None:
            section, _, name = key.rpartition(".")
            found = f"nothing with `{other}: {word}`"
            fix = f"add `{name}: …` under `{section}`, or change {other}"
            yield Problem(key, found, allowed, fix)
    for setting, other, why in NOT_WITH:
        (key, value), (_, there) = _chosen(stated, setting), _chosen(stated, other)
        if value is not None and there is not None:
            found = f"{_shown(value)} together with {other}: {_shown(there)}"
            unset = " or ".join(f"`{one}: {plain_text(_default(one))}`" for one in (key, other))
            fix = f"remove one of {key} and {other} ({unset} where it comes from `extends`)"
            yield Problem(key, found, f"one of the two{why}", fix)


def _length_of_run(recipe: Recipe) -> Iterator[Problem]:
    stated = [name for name in ("steps", "tokens", "epochs") if getattr(recipe.training, name)]
    allowed = "exactly one of steps, tokens and epochs"
    if not stated:
        yield Problem("training", "none of the three", allowed, "add e.g. `steps: 1000`")
    for extra in stated[1:]:
        found = f"both {stated[0]} and {extra}"
        fix = f"remove one (`{extra}: null` where it comes from `extends`)"
        yield Problem(f"training.{extra}", found, allowed, fix)


def _warmup(recipe: Recipe) -> Iterator[Problem]:
    if (steps := recipe.total_steps()) is not None:
        yield from _schedule_in(recipe.schedule, steps)


def _schedule_in(schedule: ScheduleSection, steps: int) -> Iterator[Problem]:
    warmup = schedule.warmup(steps)
    if schedule.decay_steps and warmup + schedule.decay_steps > steps:
        room = max(0, steps - warmup)
        found = f"{warmup} warm-up + {schedule.decay_steps} decay steps of {steps}"
        fix = f"set schedule.decay_steps to {room}" if room else "shorten the warm-up"
        yield Problem("schedule.decay_steps", found, f"at most {steps} together", fix)


def _learning_rates(recipe: Recipe) -> Iterator[Problem]:
    low, high = recipe.schedule.min_learning_rate, recipe.optimizer.learning_rate
    if low > high:
        allowed = f"at most optimizer.learning_rate ({high})"
        fix = f"set schedule.min_learning_rate to {high / 10:g}"
        yield Problem("schedule.min_learning_rate", str(low), allowed, fix)


def _optimizer(recipe: Recipe) -> Iterator[Problem]:
    """Refuse settings that the optimizer does not read, because they would change nothing."""
    optimizer = recipe.optimizer
    name, kind = optimizer.name, optimizer.kind
    for key in kind.unused:
        value, default = getattr(optimizer, key), type(optimizer).model_fields[key].default
        if value != default:
            found, allowed = f"{value} with `name: {name}`", f"nothing: {kind.title} has none"
            fix = f"remove it, or set it to {default}"
            yield Problem(f"optimizer.{key}", found, allowed, fix)
    if kind.no_adapter and recipe.adapter is not None:
        allowed = f"adamw with adapter: {kind.no_adapter}"
        fix = "set optimizer.name to adamw"
        yield Problem("optimizer.name", f"{name} together with adapter", allowed, fix)


def _model_source(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if model.hub is None and model.config is None and model.init != "pretrained":
        fix = "add `hub: <id or folder>` or `config: {model_type: …}`"
        yield Problem("model", "neither hub nor config", "at least one of them", fix)


def _model_config(recipe: Recipe) -> Iterator[Problem]:
    config, hub = recipe.model.config, recipe.model.hub
    if config is None:
        return
    if hub is not None and "model_type" not in config:
        found = f"{', '.join(config)} without model_type"
        fix = f"copy {hub} to a folder, edit its config.json, and name the folder in model.hub"
        yield Problem("model.config", found, "all of the model's config, or null", fix)
        return
    for problem in check_config(config):
        fix = problem.fix or f"write {problem.allowed}"
        yield replace(problem, key=f"model.config.{problem.key}", fix=fix)
    family = config.get("model_type")
    if recipe.model.init == "random" and family in NOT_INITIALISED:
        allowed = "pretrained or checkpoint: transformers cannot initialise this type"
        fix = "set model.init to pretrained, and model.hub to its weights"
        yield Problem("model.init", f"random with model_type: {family}", allowed, fix)


def _router_loss(recipe: Recipe) -> Iterator[Problem]:
    """Refuse the router loss that transformers adds. It depends on how a batch is split."""
    if (recipe.model.config or {}).get("output_router_logits"):
        yield Problem(
            "model.config.output_router_logits",
            "true",
            "false: transformers' balancing loss depends on the micro batches",
            "remove it and set model.balance: {kind: sequence_loss, coefficient: 0.001}",
        )


def _balanced_experts(recipe: Recipe, config: dict[str, Any]) -> Iterator[Problem]:
    if recipe.model.balance is not None:
        yield from balance_problems(recipe.model.balance, config)


def _positions(recipe: Recipe, config: dict[str, Any]) -> Iterator[Problem]:
    """Refuse a sequence longer than the positions that the recipe states for the model."""
    length = recipe.training.sequence_length
    if (most := model_rules.exceeded_positions(config, length)) is not None:
        key = "training.sequence_length"
        fix = f"set {key} to {most}, or raise model.config.max_position_embeddings"
        yield Problem(key, str(length), f"at most {most}, the positions of this model", fix)


def _dynamic_frequencies(recipe: Recipe, config: dict[str, Any]) -> Iterator[Problem]:
    """Refuse positions that transformers scales by the longest document of a micro batch. The
    loss would depend on which documents share one."""
    length, whole = recipe.training.sequence_length, read(config).config
    rope_type, limit = rope_type_of(whole), frequencies_limit(whole)
    if not recipe.data.isolates:
        return
    if rope_type in ("dynamic", "longrope") and limit is not None and length > limit:
        allowed = (
            f"at most {limit} with isolated documents and rope_type {rope_type}, whose "
            "frequencies would depend on the longest document of a micro batch"
        )
        fix = f"set it to {limit}, or do not isolate documents"
        yield Problem("training.sequence_length", str(length), allowed, fix)


def _model_in_parallel(recipe: Recipe, config: dict[str, Any]) -> Iterator[Problem]:
    """Refuse settings of `parallel` that the model's shape forbids, if each is valid by
    itself."""
    if not legality.problems(recipe.parallel, recipe.cluster):
        yield from model_rules.problems(PlanRequest.of(recipe, recipe.cluster, config))


def _nvme(recipe: Recipe) -> Iterator[Problem]:
    zero = recipe.parallel.zero
    if zero.nvme_path and not {"nvme", "auto"} & {
        zero.offload_optimizer,
        zero.offload_parameters,
    }:
        fix = "remove it, or set offload_optimizer or offload_parameters to nvme"
        allowed = "null without offload to nvme"
        yield Problem("parallel.zero.nvme_path", zero.nvme_path, allowed, fix)


def _ramp(recipe: Recipe) -> Iterator[Problem]:
    """Check that a growing batch ends at the whole one."""
    ramp, whole = recipe.training.batch_ramp, recipe.training.global_batch_size
    if ramp is not None and ramp.start >= whole:
        fix = "set it to less, or remove training.batch_ramp"
        allowed = f"less than training.global_batch_size ({whole})"
        yield Problem(f"{_RAMP}.start", str(ramp.start), allowed, fix)


def _shares(recipe: Recipe) -> Iterator[Problem]:
    """Check that ranks have equal shares of a batch. Where the recipe leaves the number of
    ranks open, the planner judges it."""
    ranks = legality.data_parallel(recipe.parallel, recipe.cluster)
    micro = recipe.training.micro_batch_size
    if recipe.training.batch_unit % ((ranks or 1) * (1 if micro == "auto" else micro)):
        error = uneven_batch(recipe, ranks or 1)
        key, _, found = error.message.partition(": ")
        yield Problem(key, found, "the same whole micro batches for every rank", error.fix)


def _moving(recipe: Recipe) -> Iterator[Problem]:
    """Check that there are ranks to move samples between."""
    ranks = legality.data_parallel(recipe.parallel, recipe.cluster)
    if recipe.parallel.balance == "auto" and 1 in (ranks, recipe.cluster.world_size):
        found, fix = "auto, and one data-parallel rank has all samples", "set it to none"
        yield Problem("parallel.balance", found, "none with one data-parallel rank", fix)


def _accelerator(recipe: Recipe) -> Iterator[Problem]:
    """Refuse an accelerator that the catalogue lacks, or that lacks the precision."""
    stated = recipe.cluster.gpu
    try:
        device = accelerator(stated)
    except PlanError as error:
        known = error.message.partition("known: ")[2]
        yield Problem("cluster.gpu", stated, known, error.fix)
        return
    precision = recipe.training.precision
    here = [name for name in ("fp32", "fp16", "bf16") if _computes(device, name)]
    if precision not in here:
        reason = f"it has no {precision} units"
        if device.generation == "cpu":
            reason = "no engine trains in fp16 there"
        found = f"{precision} on {device.name}: {reason}"
        fix = f"set training.precision to {here[-1]}"
        yield Problem("training.precision", found, ", ".join(here), fix)


def _computes(device: Gpu, precision: str) -> bool:
    if device.generation == "cpu":
        return precision in ("fp32", "bf16")
    return device.peak_flops(precision) is not None


def _following(recipe: Recipe) -> Iterator[Problem]:
    """Check that a step before the last is saved and validated, of which the best is kept."""
    saved, validated = recipe.checkpoint.every_steps, recipe.evaluation.every_steps
    steps, key = recipe.total_steps(), "checkpoint.every_steps"
    if recipe.checkpoint.keep_best is None or not (saved and validated and steps):
        return
    if math.lcm(saved, validated) >= steps:
        found = f"{saved}, but validations every {validated} of {steps:,} steps"
        allowed = "with keep_best, a step before the last that is saved and validated"
        below = saved // validated * validated or validated
        fix = f"set {key} to {below}" if below < steps else "validate and save more often"
        yield Problem(key, found, allowed, fix)


def _replicas(recipe: Recipe) -> Iterator[Problem]:
    """Check that replicas exchange weights where they save, and need no reference model."""
    if (outer := recipe.parallel.outer) is None:
        return
    steps, key = recipe.checkpoint.every_steps, "checkpoint.every_steps"
    if steps is not None and steps % outer.every_steps:
        nearest = -(-steps // outer.every_steps) * outer.every_steps
        allowed = f"null or a multiple of {outer.every_steps}, {_OUTER}.every_steps"
        yield Problem(key, str(steps), allowed, f"set {key} to {nearest}")
    if REFERENCE in recipe.objective().reads:
        key, found = "training.objective", recipe.training.objective
        allowed = f"an objective without a reference model, with {_OUTER}"
        yield Problem(key, found, allowed, f"remove {_OUTER}")


def _containers(recipe: Recipe) -> Iterator[Problem]:
    found = (recipe.launch.kubernetes.pod or {}).get("containers")
    is_list = isinstance(found, list) and all(isinstance(one, dict) for one in found)
    if found is not None and not is_list:
        shown = "a map" if isinstance(found, dict) else plain_text(found)
        fix = "write `containers: [{…}]`, the first one for the container that trains"
        yield Problem("launch.kubernetes.pod.containers", shown, "a list of maps", fix)


def _elastic(recipe: Recipe) -> Iterator[Problem]:
    """Check that every number of machines that an elastic run may have is possible."""
    launch, nodes = recipe.launch, recipe.cluster.nodes
    if (elastic := launch.elastic) is None:
        return
    if not elastic.min_nodes <= nodes <= elastic.max_nodes:
        found = f"{nodes}, outside of launch.elastic"
        allowed = f"from {elastic.min_nodes} to {elastic.max_nodes}"
        yield Problem("cluster.nodes", found, allowed, "set it to the number at the start")
        return
    if not launch.max_restarts:
        allowed = "at least 1 with launch.elastic: losing a machine restarts the ranks"
        fix = "set it to 3, restarts in a row without a newer checkpoint"
        yield Problem("launch.max_restarts", "0", allowed, fix)
    for other in range(elastic.min_nodes, elastic.max_nodes + 1):
        resized = recipe.with_values({"cluster.nodes": other})
        problems = (*legality.problems(resized.parallel, resized.cluster), *_shares(resized))
        problem = next(iter(problems), None)
        if problem is not None and other != nodes:
            found = f"{elastic.min_nodes} to {elastic.max_nodes}, but with {other} machines "
            found += f"{problem.key}: {problem.found}"
            fix = f"other numbers of machines, or with {other}: {problem.fix}"
            allowed = f"{problem.key}: {problem.allowed}"
            yield Problem("launch.elastic", found, allowed, fix)
            return


def _degrees(recipe: Recipe) -> Iterable[Problem]:
    return legality.problems(recipe.parallel, recipe.cluster)


RULES: tuple[Callable[[Recipe], Iterable[Problem]], ...] = (
    _tables,
    _length_of_run,
    _warmup,
    _learning_rates,
    _optimizer,
    _model_source,
    _model_config,
    _router_loss,
    _degrees,
    context.unused,
    _nvme,
    _shares,
    _moving,
    _ramp,
    _accelerator,
    kernels.fp8_settings,
    _replicas,
    _following,
    *DATA_RULES,
    _containers,
    _elastic,
)

MODEL_RULES: tuple[Callable[[Recipe, dict[str, Any]], Iterable[Problem]], ...] = (
    _balanced_experts,
    _positions,
    _dynamic_frequencies,
    _model_in_parallel,
)
"""Rules about the model's config, where the recipe has a whole one."""
