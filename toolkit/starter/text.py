"""A recipe as a short YAML with comments: what `auto` comes to on this cluster."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.intake.load import judged
from toolkit.layout import Layout
from toolkit.plan.dimensions import DIMENSION
from toolkit.plan.estimate import Estimate, estimate_plan
from toolkit.plan.hardware.cluster import Cluster
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.dump import commented
from toolkit.recipe.schema import Recipe
from toolkit.recipe.yaml_text import Location, Stated
from toolkit.starter.draft import Task, draft, lacks_tokenizer
from toolkit.text.units import GIB, duration, human, seconds

_DEGREES = tuple(
    DIMENSION[field]
    for field in ("tp", "pp", "vpp", "sequence_parallel", "zero_stage", "recompute")
)
"""Settings of `parallel` besides engine and model."""


def starter(
    model: str, cluster: Cluster, given: str, task: Task, data: Path | None = None
) -> str:
    """The YAML of a recipe for `model` on `cluster`, which the user called `given`. `data`: a
    file to train on.

    It is checked and planned before it is returned. Raises PlanError or RecipeError where that
    is not possible.
    """
    given = " ".join(given.split())  # it is quoted in comments
    drafted = draft(model, cluster, task)
    if data is not None:
        from toolkit.starter.data import with_data

        drafted = with_data(drafted, data, task)
    values = stated(drafted)
    recipe = judged(Stated(values, {(): Location(model, 0)}))
    plan = plan_recipe(recipe, cluster, explained=False)
    option = f" --cluster {given}" if given.endswith((".yaml", ".yml")) else ""
    head = [
        f"{recipe.name} on {given}, written by `dmt init`. Every number is yours to change.",
        f"Next: dmt check FILE; dmt plan FILE{option} --explain",
        *_promise(recipe, cluster, plan, estimate_plan(recipe, plan, cluster)),
    ]
    comments = dict(_comments(recipe, plan))
    if option:
        comments["cluster"] = f"measured speeds: add `{option.strip()}` to commands"
    return "\n".join([*(f"# {line}" for line in head), *commented(values, comments)])


def stated(recipe: Recipe) -> dict[str, Any]:
    """The settings to write: an `auto` layout, and the values that the cluster decided. Those
    values are written even if the source left them to their defaults."""
    shown = recipe.model_dump(exclude_unset=True)
    decided = {
        name: getattr(recipe.training, name) for name in ("global_batch_size", "precision")
    }
    keys = ["engine", "model", *(one.key.split(".")[1] for one in _DEGREES)]
    parallel = {key: {"stage": "auto"} if key == "zero" else "auto" for key in keys}
    first = {key: shown.pop(key) for key in ("name", "model", "data")}
    training = {**shown.pop("training"), **decided, "micro_batch_size": "auto"}
    rest = {
        key: one for key, one in shown.items() if one and key not in ("parallel", "cluster")
    }
    return {
        **first, "training": training, **rest, "parallel": parallel,
        "cluster": recipe.cluster.model_dump(),
    }  # fmt: skip


def _comments(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, str]]:
    """The planned values of open settings, by dotted name."""
    training, layout = recipe.training, plan.layout
    tokens = training.batches.tokens(1)
    yield "model", f"{plan.parameters:,} parameters"
    if lacks_tokenizer(Path(recipe.data.tokenizer)):
        yield "data.tokenizer", "TO DO: it holds no tokenizer; copy one there, or name another"
    yield "training.global_batch_size", f"samples; {human(tokens)} tokens a step"
    if (steps := recipe.total_steps()) is not None:
        yield "training.steps", f"{human(steps * tokens)} tokens"
        yield "training.tokens", f"{human(steps * tokens)}; {steps:,} steps"
    often = layout.gradient_accumulation
    yield "training.micro_batch_size", f"now {layout.micro_batch}, {often} a step and rank"
    yield "parallel", "what you set instead of `auto` is kept"
    yield "parallel.engine", f"now {plan.engine}"
    yield "parallel.model", f"now {plan.model}"
    for one in _DEGREES:
        if one.field != "zero_stage":
            yield f"parallel.{one.setting}", f"now {str(getattr(layout, one.field)).lower()}"
    yield "parallel.zero", f"now {', '.join([f'stage {layout.zero_stage}', *_offload(layout)])}"


def _offload(layout: Layout) -> Iterator[str]:
    places = {"optimizer": layout.offload_optimizer, "parameters": layout.offload_parameters}
    return (f"{what} on {place}" for what, place in places.items() if place != "none")


def _promise(recipe: Recipe, cluster: Cluster, plan: Plan, found: Estimate) -> Iterator[str]:
    """Predicted memory, speed and length of the run."""
    capacity, total = cluster.gpu.memory_gib, found.memory.total / GIB
    verdict = "" if plan.fits else "DOES NOT FIT (see `dmt plan`): "
    limit = "" if capacity is None else f" of {capacity:g}"
    per = "process" if capacity is None else "GPU"
    time = found.time
    share = time.utilization()
    mfu = "" if share is None else f", MFU {share:.0%}"
    yield (
        f"Planned: {verdict}{total:.{1 if total >= 1 else 2}f}{limit} GiB per {per}; "
        f"{seconds(time.total_s)} a step, {time.tokens_per_s_per_gpu:,.0f} tokens/s per {per}"
        f"{mfu}."
    )
    if cluster.basis == "nominal":
        yield "These are a nominal CPU's times: `dmt doctor --calibrate` measures this one."
    if (steps := recipe.total_steps()) is not None:
        length = steps * time.total_s
        gpu_hours = length / 3600 * plan.layout.world
        price = cluster.price_per_gpu_hour
        cost = "" if price is None else f", {gpu_hours * price:,.0f} at the cluster's price"
        yield f"{steps:,} steps take {duration(length)}: {gpu_hours:,.1f} {per} hours{cost}."
