"""A recipe as a short YAML with comments: what `auto` comes to on this cluster."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.intake.load import load_recipe
from toolkit.layout import Layout
from toolkit.plan.dimensions import DIMENSION
from toolkit.plan.estimate import Estimate, estimate_plan
from toolkit.plan.hardware.cluster import Cluster
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.dump import dump
from toolkit.recipe.schema import Recipe
from toolkit.starter.draft import Task, draft
from toolkit.text.units import GIB, human, seconds

COLUMN = 34
"""Where comments begin, unless the setting is longer."""
SECONDS_PER_HOUR, HOURS_PER_DAY = 3600, 24
_PLAIN = ("adapter", "dpo", "optimizer", "schedule", "evaluation", "checkpoint", "logging")
"""Sections without comments, each on one line."""
_DEGREES = tuple(
    DIMENSION[field]
    for field in ("tp", "pp", "vpp", "sequence_parallel", "zero_stage", "recompute")
)
"""Settings of `parallel` besides engine and model."""


def starter(
    model: str, cluster: Cluster, given: str, task: Task, data: Path | None = None
) -> str:
    """The YAML of a recipe for `model` on `cluster`, which the user called `given`; `data`: a
    file to train on.

    It is read back and planned before it is returned: what it says can be checked and
    planned. Raises PlanError or RecipeError where that is not possible.
    """
    given = " ".join(given.split())  # it is quoted in comments
    drafted = draft(model, cluster, task)
    if data is not None:
        from toolkit.starter.data import with_data

        drafted = with_data(drafted, data, task)
    with tempfile.TemporaryDirectory(prefix="dmt-init-") as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text("\n".join(_lines(drafted, cluster, given, None)), encoding="utf-8")
        recipe = load_recipe(file)
    plan = plan_recipe(recipe, cluster, explained=False)
    found = estimate_plan(recipe, plan, cluster)
    return "\n".join(_lines(drafted, cluster, given, (plan, found)))


def _lines(
    recipe: Recipe, cluster: Cluster, given: str, planned: tuple[Plan, Estimate] | None
) -> Iterator[str]:
    """The file line by line; without a plan, its comments are missing."""
    shown = recipe.model_dump(exclude_unset=True)
    yield f"# {recipe.name} on {given}, written by `dmt init`. Every number is yours to change."
    option = f" --cluster {given}" if _is_file(given) else ""
    yield f"# Next: dmt check FILE; dmt plan FILE{option} --explain"
    yield f"name: {recipe.name}"
    yield from _model(shown["model"], planned)
    yield ""
    yield "data:"
    for key, value in shown["data"].items():
        yield from _setting(f"  {key}", value)
    yield ""
    training = {**shown["training"], **_batch(recipe), "micro_batch_size": "auto"}
    comments = _training_comments(recipe, planned)
    yield "training:"
    for key, value in training.items():
        shown_value = _large(value) if key == "tokens" else _flow(value)
        yield _line(f"  {key}: {shown_value}", comments.get(key, ""))
    yield ""
    for section in _PLAIN:
        if shown.get(section):
            yield from _section(section, shown[section])
    yield ""
    yield from _parallel(planned)
    yield ""
    if planned is not None:
        yield from _promise(recipe, cluster, *planned)
    where = recipe.cluster.model_dump()
    note = f"measured speeds: add `--cluster {given}` to commands" if _is_file(given) else ""
    yield _line(f"cluster: {_flow(where)}", note)


def _section(name: str, shown: Mapping[str, Any]) -> Iterator[str]:
    """On one line, unless a list in it needs several."""
    if not any(map(_is_list_of_maps, shown.values())):
        yield f"{name}: {_flow(shown)}"
        return
    yield f"{name}:"
    for key, value in shown.items():
        yield from _setting(f"  {key}", value)


def _setting(key: str, value: Any) -> Iterator[str]:
    """On one line; of a list of maps, each on its own."""
    if not _is_list_of_maps(value):
        yield f"{key}: {_flow(value)}"
        return
    yield f"{key}:"
    indent = " " * (len(key) - len(key.lstrip()) + 2)
    for item in value:
        yield f"{indent}- {_flow(item)}"


def _is_list_of_maps(value: object) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value)


def _is_file(given: str) -> bool:
    return given.endswith((".yaml", ".yml"))


def _batch(recipe: Recipe) -> dict[str, Any]:
    """Settings that the cluster decided, also where the source left them to their defaults."""
    training = recipe.training
    return {
        "global_batch_size": training.global_batch_size,
        "precision": training.precision,
    }


def _model(shown: Mapping[str, Any], planned: tuple[Plan, Estimate] | None) -> Iterator[str]:
    size = f"{planned[0].parameters:,} parameters" if planned else ""
    yield _line("model:", size)
    for key, value in shown.items():
        if key != "config":
            yield f"  {key}: {_flow(value)}"
    if shown.get("config"):
        yield "  config:"
        for key, value in shown["config"].items():
            yield f"    {key}: {_flow(value)}"


def _training_comments(recipe: Recipe, planned: tuple[Plan, Estimate] | None) -> dict[str, str]:
    training = recipe.training
    tokens = training.batches.tokens(1)
    comments = {"global_batch_size": f"samples; {human(tokens)} tokens a step"}
    if (steps := recipe.total_steps()) is not None:
        comments["steps" if training.steps else "tokens"] = (
            f"{human(steps * tokens)} tokens" if training.steps else f"{steps:,} steps"
        )
    if planned is not None:
        layout = planned[0].layout
        often = layout.gradient_accumulation
        comments["micro_batch_size"] = f"now {layout.micro_batch}, {often} a step and rank"
    return comments


def _parallel(planned: tuple[Plan, Estimate] | None) -> Iterator[str]:
    """Every degree as `auto`, with what it comes to."""
    now: dict[str, object] = {}
    if planned is not None:
        plan, layout = planned[0], planned[0].layout
        now = {
            "engine": plan.engine,
            "model": plan.model,
            **{one.setting: str(getattr(layout, one.field)).lower() for one in _DEGREES},
            "zero": ", ".join([f"stage {layout.zero_stage}", *_offload(layout)]),
        }
    yield _line("parallel:", "what you set instead of `auto` is kept")
    settings = [one.key.split(".")[1] for one in _DEGREES]
    for key in ("engine", "model", *settings):
        value = "{stage: auto}" if key == "zero" else "auto"
        yield _line(f"  {key}: {value}", f"now {now[key]}" if key in now else "")


def _offload(layout: Layout) -> Iterator[str]:
    places = {"optimizer": layout.offload_optimizer, "parameters": layout.offload_parameters}
    return (f"{what} on {place}" for what, place in places.items() if place != "none")


def _promise(recipe: Recipe, cluster: Cluster, plan: Plan, found: Estimate) -> Iterator[str]:
    """Memory, speed and length of the run."""
    capacity, total = cluster.gpu.memory_gib, found.memory.total / GIB
    verdict = "" if plan.fits else "DOES NOT FIT (see `dmt plan`): "
    limit = "" if capacity is None else f" of {capacity:g}"
    per = "process" if capacity is None else "GPU"
    time = found.time
    tokens = f"{time.tokens_per_s_per_gpu:,.0f} tokens/s per {per}"
    speed = f"{seconds(time.total_s)} a step, {tokens}"
    share = time.utilization()
    mfu = "" if share is None else f", MFU {share:.0%}"
    yield f"# Planned: {verdict}{_gib(total)}{limit} GiB per {per}; {speed}{mfu}."
    if cluster.basis == "nominal":
        yield "# These are a nominal CPU's times: `dmt doctor --calibrate` measures this one."
    if (steps := recipe.total_steps()) is not None:
        hours = steps * time.total_s / SECONDS_PER_HOUR
        gpu_hours = hours * plan.layout.world
        cost = ""
        if cluster.price_per_gpu_hour is not None:
            cost = f", {gpu_hours * cluster.price_per_gpu_hour:,.0f} at the cluster's price"
        length = f"{hours / HOURS_PER_DAY:,.1f} days" if hours > HOURS_PER_DAY else _time(hours)
        yield f"# {steps:,} steps take {length}: {gpu_hours:,.1f} {per} hours{cost}."


def _gib(size: float) -> str:
    return f"{size:.1f}" if size >= 1 else f"{size:.2g}"


def _time(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"


def _line(setting: str, comment: str) -> str:
    return f"{setting:<{COLUMN}}# {comment}" if comment else setting


def _flow(value: object) -> str:
    """A value on one line, as YAML."""
    text = dump({"value": value}, flow=True).strip()
    return text.removeprefix("{value: ").removesuffix("}")


def _large(number: int) -> str:
    """A number of tokens: `15.0e12`."""
    text = f"{number / 1e12:.12g}e12"
    return text if number >= 1e9 and float(text) == number else str(number)
