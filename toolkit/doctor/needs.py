"""What a recipe requires of the machine that it is started on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.backend import BACKENDS
from toolkit.data.remote import PACKAGES
from toolkit.launchers import LAUNCHERS
from toolkit.models.hub import ShapeUnknown, model_config
from toolkit.recipe.places import is_remote
from toolkit.recipe.schema import Recipe, RowsSource
from toolkit.run.assignment import Assignment, decide
from toolkit.run.trackers import TRACKERS, wanted

EVERY_RECIPE = "every recipe"


@dataclass(frozen=True)
class Needs:
    """The requirements, with the settings behind them. `Needs()` is what every recipe needs."""

    run: str | None = None
    """The setting that needs ranks to run here at all. None without a recipe."""
    packages: Mapping[str, str] = field(default_factory=lambda: {"torch": EVERY_RECIPE})
    """The setting that needs each distribution, by name, as `KEY: VALUE`."""
    programs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The setting that needs each program, and how to install it, by name."""
    ops: Mapping[str, str] = field(default_factory=dict)
    """Operators that DeepSpeed compiles."""
    compiles: str | None = None
    """The setting for which torch or Triton compiles kernels."""
    gpus: int = 0
    """How many GPUs this machine must have."""
    gpu: str | None = None
    """The setting that needs GPUs."""
    precision: str | None = None
    """`bf16` where it must be the GPU's own."""
    several_machines: str | None = None
    """The setting that uses several machines."""
    run_dir: Path = Path("runs")
    nvme: Path | None = None
    checkpoint_bytes: int | None = None
    """Bytes of one checkpoint. None where the model's size is not known."""
    checkpoints_kept: int = 1
    note: str = ""
    """What could not be determined, and why."""


def needs_of(recipe: Recipe) -> Needs:
    """The requirements of running `recipe` from this machine. Nothing is downloaded.

    Raises PlanError or RecipeError if it cannot run anywhere.
    """
    launcher = LAUNCHERS[recipe.launch.launcher]
    setting = f"launch.launcher: {recipe.launch.launcher}"
    packages = dict.fromkeys(launcher.packages, setting)
    programs = {name: (setting, how) for name, how in launcher.programs.items()}
    assignment, note = _decided(recipe)
    compiled = assignment.plan.layout.compiles if assignment else None
    run_dir = Path("runs") / recipe.name
    if not launcher.here:
        note = f"{setting} trains on other machines: run `dmt doctor` there, too"
        return Needs(packages=packages, programs=programs, run_dir=run_dir, note=note)
    several = None
    if recipe.cluster.nodes > 1:
        several = f"cluster.nodes: {recipe.cluster.nodes}"
    on_gpus = recipe.cluster.gpu != "cpu"
    nvme = recipe.parallel.zero.nvme_path
    return Needs(
        run=EVERY_RECIPE,
        packages=packages | dict(_packages(recipe, assignment)),
        programs=programs,
        ops=_ops(assignment),
        compiles=f"kernels.{compiled}" if compiled else None,
        gpus=recipe.cluster.gpus_per_node if on_gpus else 0,
        gpu=f"cluster.gpu: {recipe.cluster.gpu}" if on_gpus else None,
        precision=recipe.training.precision if on_gpus else None,
        several_machines=several,
        run_dir=run_dir,
        nvme=Path(nvme) if nvme else None,
        checkpoint_bytes=_checkpoint_bytes(assignment),
        checkpoints_kept=recipe.checkpoint.keep + (recipe.checkpoint.keep_best or 0),
        note=note,
    )


def _decided(recipe: Recipe) -> tuple[Assignment | None, str]:
    """The plan, or why there is none: a shape that only the hub knows."""
    try:
        config = model_config(recipe.model, download=False)
    except ShapeUnknown as error:
        return None, f"not planned, so only what the recipe states is known: {error.message}"
    recipe = recipe.with_values({"model.config": config})
    return decide(recipe, None, download=False, explained=False), ""


def _packages(recipe: Recipe, assignment: Assignment | None) -> Iterator[tuple[str, str]]:
    for package in ("torch", "transformers", "safetensors"):
        yield package, EVERY_RECIPE
    engine, model = recipe.parallel.engine, recipe.parallel.model
    if assignment is not None:
        engine, model = assignment.plan.engine, assignment.plan.model
    if engine != "auto":
        for package in BACKENDS[engine].packages:
            yield package, f"parallel.engine: {engine}"
    if model == "megatron":
        yield "megatron-core", f"parallel.model: {model}"
    if recipe.adapter is not None:
        yield "peft", "adapter"
    if recipe.parallel.outer is not None:
        yield "torchft", "parallel.outer"
    if recipe.kernels.fp8 is not None:
        yield "torchao", f"kernels.fp8: {recipe.kernels.fp8}"
    for name in ("fused", "loss"):
        if getattr(recipe.kernels, name) == "liger":
            yield "liger-kernel", f"kernels.{name}: liger"
    for package in recipe.optimizer.kind.packages:
        yield package, f"optimizer.name: {recipe.optimizer.name}"
    for _, source in recipe.data.named_sources:
        if isinstance(source, RowsSource):
            yield "datasets", f"data: kind: {source.kind}"
        for place in filter(is_remote, source.places):
            scheme = place.partition(":")[0]
            if scheme in PACKAGES:
                yield PACKAGES[scheme], f"data: {scheme}://"
    for name in wanted(recipe.logging):
        for package in TRACKERS[name].packages or [name]:
            yield package, f"logging.trackers: {name}"


def _ops(assignment: Assignment | None) -> dict[str, str]:
    """The operators to compile, each with the setting that needs it."""
    if assignment is None:
        return {}
    plan = assignment.plan
    layout = plan.layout
    offload = f"parallel.zero.offload_optimizer: {layout.offload_optimizer}"
    on_nvme = "nvme" in (layout.offload_optimizer, layout.offload_parameters)
    nvme = "parallel.zero: offload to nvme" if on_nvme else ""
    by_op = {"cpu_adam": offload, "pin_memory": nvme, "async_io": nvme}
    return {
        op: by_op.get(op, f"parallel.engine: {plan.engine}")
        for op in BACKENDS[plan.engine].operators(assignment.engine_config)
    }


def _checkpoint_bytes(assignment: Assignment | None) -> int | None:
    """Bytes of fp32 weights and both of Adam's moments for what trains. With adapters, nothing
    is counted of frozen parameters (docs/checkpoints.md)."""
    if assignment is None:
        return None
    plan, adapted = assignment.plan, assignment.recipe.adapter is not None
    frozen = plan.frozen_parameters
    return 12 * (plan.parameters - frozen) + (0 if adapted else 4 * frozen)
