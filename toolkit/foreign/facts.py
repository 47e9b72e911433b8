"""The settings of a recipe and its plan: the side that everything is compared with."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.backend import BACKENDS
from toolkit.engines.megatron.config import render_model, trained_config
from toolkit.errors import DmtError
from toolkit.foreign.base import (
    ACCUMULATION,
    AUTO,
    COMPILED,
    DATA_PARALLEL,
    REPLICAS,
    SHARDS,
    WORLD,
)
from toolkit.intake.explain import node_at, place_of
from toolkit.intake.layers import read_layers
from toolkit.models.families import common, megatron_model, model_spec, unsupported
from toolkit.plan.dimensions import settings
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import LENGTH_SETTINGS, Recipe
from toolkit.text.dotted import leaves

DERIVED: Mapping[str, str] = {
    WORLD: "cluster.nodes · cluster.gpus_per_node",
    ACCUMULATION: "training.global_batch_size / (training.micro_batch_size · dp)",
    DATA_PARALLEL: "world / (tensor · pipeline · context)",
    COMPILED: "false: no model is compiled",
    SHARDS: "dp under ZeRO, 1 without",
    REPLICAS: "dp / shards: parallel.replicate under FSDP",
}
"""The origin of a derived value."""


Places = Callable[[str], str]
"""Where the recipe states a key: `FILE:LINE`; empty where it does not."""


@dataclass(frozen=True)
class Fact:
    """One value of the run."""

    value: object
    origin: str
    """`FILE:LINE`, `default`, `planned`, `derived: …`."""


def places_in(path: Path, overrides: Sequence[str] = ()) -> Places:
    """Where the recipe file at `path`, with its overrides, states each setting."""
    root = read_layers(path, overrides).root

    def place(key: str) -> str:
        parts = key.split(".")
        if node_at(parts, root) is None:
            return ""
        file, line = place_of(parts, root)
        return f"{file}:{line}" if line else file

    return place


def facts(recipe: Recipe, plan: Plan | None, places: Places = lambda _: "") -> dict[str, Fact]:
    """Every value of the run by its key. Without a plan, `auto` values are omitted."""
    found = {
        key: Fact([*value] if isinstance(value, tuple) else value, places(key) or "default")
        for key, value in leaves(recipe.model_dump(exclude={"model": {"config"}}))
        # One of the three lengths is stated; the others are unknown, not nothing.
        if value != AUTO and not (value is None and key in LENGTH_SETTINGS)
    }
    if recipe.schedule.warmup_ratio is not None:
        del found["schedule.warmup_steps"]
    derived = {
        WORLD: recipe.cluster.world_size,
        COMPILED: False,
    }
    if plan is not None:
        planned = {"parallel.engine": plan.engine, "parallel.model": plan.model}
        planned |= settings(plan.layout)
        found = {key: Fact(value, "planned") for key, value in planned.items()} | found
        derived[ACCUMULATION] = plan.layout.gradient_accumulation
        derived[DATA_PARALLEL] = plan.layout.dp
        shards = max(1, plan.layout.dp // plan.layout.replicate)
        derived[SHARDS] = shards if plan.layout.zero_stage else 1
        derived[REPLICAS] = plan.layout.dp // derived[SHARDS]
        fixed = BACKENDS[plan.engine].fixed.items()
        origin = "fixed: any other value changes or corrupts the loss"
        found |= {f"{plan.engine}.{key}": Fact(value, origin) for key, value in fixed}
    found |= {key: Fact(value, f"derived: {DERIVED[key]}") for key, value in derived.items()}
    found |= _composed(recipe, found)
    found |= _shape(recipe, plan, places)
    return found


def values_of(recipe: Recipe, plan: Plan) -> dict[str, object]:
    """The values of a planned run by their keys."""
    return {key: fact.value for key, fact in facts(recipe, plan).items()}


def _composed(recipe: Recipe, found: Mapping[str, Fact]) -> dict[str, Fact]:
    """Settings that correspond to two settings of a recipe, or the reverse."""
    composed = {}
    betas = found["optimizer.betas"]
    for index, beta in enumerate(recipe.optimizer.betas):
        composed[f"optimizer.betas[{index}]"] = Fact(beta, betas.origin)
    if recipe.training.tokens is not None:
        steps = recipe.total_steps()
        composed["training.steps"] = Fact(steps, "derived: training.tokens")
    steps, ratio = recipe.total_steps(), recipe.schedule.warmup_ratio
    if ratio is not None and steps is not None:
        warmup = Fact(recipe.schedule.warmup(steps), "derived: schedule.warmup_ratio")
        composed["schedule.warmup_steps"] = warmup
    wandb = recipe.logging.wandb
    on = wandb is not None and wandb.mode != "disabled"
    mode = found.get("logging.wandb.mode") or found["logging.wandb"]
    composed["logging.wandb"] = Fact(on, mode.origin)
    for name, field in (("mlflow", "experiment"), ("trackio", "project")):
        key = f"logging.{name}"
        origin = (found.get(f"{key}.{field}") or found[key]).origin
        composed[key] = Fact(getattr(recipe.logging, name) is not None, origin)
    return composed


def _shape(recipe: Recipe, plan: Plan | None, places: Places) -> dict[str, Fact]:
    """The model in megatron-core's terms, if the recipe states enough.

    Includes the layout's additions if megatron-core's model is planned.
    """
    shape: dict[str, Any] = {}
    config: dict[str, Any] = {}
    with suppress(DmtError):  # only on the hub
        config = trained_config(recipe.model)
        spec = model_spec(config)
        shape = {**common.transformer_sizes(spec), **common.gpt_sizes(spec)}
        if unsupported(config) is None:
            model = megatron_model(config)
            shape = {**model.transformer, **model.gpt}
        if plan is not None and plan.model != "hf":
            sections = render_model(
                model, plan.layout, recipe.training.precision, recipe.training.deterministic
            )
            shape = {**sections["transformer"], **sections["gpt"]}
    if "max_sequence_length" in shape:
        positions = max(shape["max_sequence_length"], recipe.training.sequence_length)
        shape["max_sequence_length"] = positions
    origin = places("model.config") or places("model.hub") or "default"
    values = {f"megatron.{name}": value for name, value in shape.items()}
    values |= {f"model.config.{name}": value for name, value in config.items()}
    return {key: Fact(value, origin) for key, value in values.items()}
