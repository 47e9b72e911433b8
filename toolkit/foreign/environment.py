"""Variables of the environment: those with which a run would hang or compute something else,
and those by which `accelerate launch` configures a script."""

import os
from collections.abc import Iterator, Mapping
from typing import Literal

from toolkit.backend import BACKENDS
from toolkit.engines import deterministic
from toolkit.errors import PlanError
from toolkit.recipe.schema import Recipe
from toolkit.text.terminal import tell

Starting = Literal["launch", "worker"]
"""`dmt launch` starts its own workers. launch/train.py was started by another launcher."""

ENGINES: Mapping[str, str] = {
    kind: engine for engine in BACKENDS.names for kind in BACKENDS[engine].distributed_types
}
"""Accelerate's `distributed_type` → the engine that trains so."""

SWITCHES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ACCELERATE_USE_DEEPSPEED": ("DEEPSPEED", ("ACCELERATE_DEEPSPEED_",)),
    "ACCELERATE_USE_FSDP": ("FSDP", ("FSDP_",)),
    "ACCELERATE_USE_MEGATRON_LM": ("MEGATRON_LM", ("MEGATRON_LM_",)),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("", ("PARALLELISM_CONFIG_",)),
}
"""Accelerate's switches, the distributed_type that each means (a parallelism config has none),
and the variables that count only then."""

_ACCELERATE = (
    *("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "ACCELERATE_DYNAMO_"),
    *("ACCELERATE_GRADIENT_", "ACCELERATE_CONFIG_DS_FIELDS", *SWITCHES),
    *(prefix for _, prefixes in SWITCHES.values() for prefix in prefixes),
)


def preflight(
    recipe: Recipe, starting: Starting, environ: Mapping[str, str] | None = None
) -> None:
    """Refuse variables with which the run would hang or compute something else, and name those
    of Accelerate's launcher that the recipe overrules.

    `environ` is os.environ unless given. `check_world` judges WORLD_SIZE. Raises PlanError.
    """
    environ = os.environ if environ is None else environ
    if starting == "worker" and (overruled := [*_overruled(recipe, environ)]):
        tell(f"dmt: {', '.join(overruled)}: the recipe takes precedence")
    found = [*_conflicts(recipe, starting, environ)]
    if found:
        raise PlanError(
            "the environment disagrees with the recipe: "
            + ", ".join(f"{name}={environ[name]} ({what})" for name, what, _ in found),
            fix="; ".join(dict.fromkeys(fix for *_, fix in found)),
        )


def _conflicts(
    recipe: Recipe, starting: Starting, environ: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Variables that leave ranks without a GPU or change what is computed: what they
    contradict, and a fix."""
    cluster, visible = recipe.cluster, environ.get("CUDA_VISIBLE_DEVICES")
    if starting == "launch" and cluster.gpu != "cpu" and visible is not None:
        names = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
        if len(names) < cluster.gpus_per_node:
            what = f"cluster.gpus_per_node is {cluster.gpus_per_node}"
            fix = "list as many GPUs as cluster.gpus_per_node, or unset it"
            yield "CUDA_VISIBLE_DEVICES", what, fix
    gpu, name = cluster.gpu, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    for engine in BACKENDS.names:
        variable = BACKENDS[engine].device_variable
        asked = environ.get(variable) if recipe.parallel.engine in ("auto", engine) else None
        if starting == "launch" and gpu == "cpu":
            continue  # `dmt launch` sets it itself
        if asked is not None and (asked == "cpu") != (gpu == "cpu"):
            yield variable, f"cluster.gpu is {gpu}", f"unset {variable}"
    if gpu == "cpu":
        return
    is_on = environ.get(name, "").lower() in ("1", "true", "yes", "on")
    if is_on and recipe.training.precision == "fp32":
        what = "training.precision is fp32"
        yield name, what, "unset it: products of fp32 matrices would have ten bits"
    if recipe.training.deterministic:
        for variable in deterministic.unsuitable(environ):
            usual = deterministic.VARIABLES[variable][0]
            fix = f"unset {variable}, or set it to {usual}"
            yield variable, "training.deterministic is true", fix


def _overruled(recipe: Recipe, environ: Mapping[str, str]) -> Iterator[str]:
    """Settings of Accelerate's launcher that disagree with the recipe's."""
    engine, precision = recipe.parallel.engine, recipe.training.precision
    for name, (kind, _) in SWITCHES.items():
        is_on = environ.get(name, "").lower() in ("1", "true", "yes", "on")
        if is_on and engine not in ("auto", ENGINES.get(kind)):
            yield f"{name}={environ[name]} (parallel.engine is {engine})"
    name = "ACCELERATE_MIXED_PRECISION"
    if environ.get(name, "no") not in ("no", precision):
        yield f"{name}={environ[name]} (training.precision is {precision})"
    name = "ACCELERATE_DYNAMO_BACKEND"
    if environ.get(name, "no").lower() != "no":
        yield f"{name}={environ[name]} (kernels.compile decides)"


def accelerate_settings(environ: Mapping[str, str]) -> list[str]:
    """Variables by which `accelerate launch` overrules the arguments of an Accelerator."""
    return [name for name in environ if name.startswith(_ACCELERATE)]


def mesh_variables(sizes: Mapping[str, object]) -> dict[str, str]:
    """What `accelerate launch` makes of a `ParallelismConfig` by the names of its fields."""
    stated = {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in sizes.items()}
    return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **stated} if stated else {}
