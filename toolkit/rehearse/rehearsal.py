"""The rehearsal: trains a small recipe in each layout and compares the results."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path
from tempfile import TemporaryDirectory

from toolkit.adapters.lora import trained_tensors
from toolkit.backend import BACKENDS, adopt_engine_config
from toolkit.errors import BackendUnavailable, PlanError, RecipeError, RunFailed
from toolkit.intake.checks import broken_rules
from toolkit.models.families import model_spec
from toolkit.models.hub import model_config
from toolkit.models.parameter_groups import in_small_model
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import (
    CheckpointSection,
    ClusterSection,
    EvaluationSection,
    LoggingSection,
    ParallelSection,
    Recipe,
    ScheduleSection,
)
from toolkit.registry import load
from toolkit.rehearse.comparison import (
    Bounds,
    Comparison,
    Record,
    Verdict,
    compare,
    read_record,
    tolerance,
)
from toolkit.rehearse.layouts import RehearsedLayout, candidates, degrees, select
from toolkit.rehearse.ranks import Failure, launch_spec, run_ranks
from toolkit.rehearse.shrink import (
    shrink_config,
    shrink_freeze,
    shrink_sequence,
    shrink_window,
    without_noise,
)
from toolkit.run.assignment import Assignment, decide, write
from toolkit.text.terminal import tell

LEAST_BATCH = 8
"""Sequences per step: two data-parallel ranks with two micro batches of two, or four
micro batches for a pipeline. More only where a pipeline asks for it."""
MICRO_BATCH = 2


@dataclass(frozen=True)
class Options:
    """Options of a rehearsal."""

    steps: int = 5
    processes: int = 4
    """Layouts that need more are skipped."""
    limit_s: float = 300.0
    """A layout that takes longer counts as hung."""
    worker: str = "toolkit.rehearse.worker"
    """Module that every rank of a layout runs, with the run directory as its argument."""
    gpu: str = "cpu"
    """The layouts' device, by its name in the hardware catalogue; the reference runs on the
    CPU."""


@dataclass(frozen=True)
class LayoutResult:
    """The result of one layout."""

    candidate: RehearsedLayout
    plan: Plan | None = None
    """None if the layout is not legal for this recipe."""
    record: Record = field(default_factory=Record)
    comparison: Comparison | None = None
    """None for a layout that was skipped or failed."""
    skipped: str | None = None
    """Why it was not run."""
    failure: Failure | None = None

    @property
    def verdict(self) -> Verdict:
        """A layout that failed has diverged."""
        if self.skipped is not None:
            return "skipped"
        return self.comparison.verdict if self.comparison else "diverged"

    @property
    def why(self) -> str:
        """The reason of the verdict, on one line; empty where everything is the same."""
        if self.skipped is not None:
            return self.skipped
        if self.failure is not None:
            done = len(self.record.loss)
            return f"failed{f' after step {done}' if done else ''}: {self.failure.why}"
        first = self.comparison.first if self.comparison else None
        return str(first) if first else ""


@dataclass(frozen=True)
class Rehearsal:
    """A recipe made small, and the layouts to try it in."""

    recipe: Recipe
    """The small one; its `parallel` section is replaced by each layout's."""
    plan: Plan
    """The plan of the recipe as it was written."""
    original: Recipe
    """The recipe as it was written, its model's shape looked up."""
    layouts: tuple[RehearsedLayout, ...]
    """The recipe's own first."""


@dataclass(frozen=True)
class RehearsalResult:
    """What a recipe did in every layout that was tried, against plain transformers."""

    rehearsal: Rehearsal
    reference: Record
    """Loss and gradient norm of every step without any engine, in one process."""
    layouts: tuple[LayoutResult, ...]

    @property
    def equal(self) -> bool:
        """Whether at least one layout ran, and each that ran did as the reference."""
        verdicts = {one.verdict for one in self.layouts} - {"skipped"}
        return bool(verdicts) and "diverged" not in verdicts


def rehearse_recipe(
    recipe: Recipe,
    layouts: Sequence[str] = (),
    *,
    steps: int = 5,
    processes: int = 4,
    time_limit_s: float = 300.0,
    report: Callable[[Rehearsal | Record | LayoutResult], None] = lambda _: None,
) -> RehearsalResult:
    """Train a small copy in every layout that this machine's CPUs can run, and compare.

    `layouts`: names or globs, such as `zero*`; default: all. `report` is called with the
    rehearsal before anything runs, then with the reference's record and each layout's result.
    Raises as `prepare`, `select` and `run` do.
    """
    options = Options(steps, processes, time_limit_s)
    rehearsal = prepare(recipe, options)
    chosen = select(rehearsal.layouts, layouts)
    report(rehearsal)
    reference, results = Record(), list[LayoutResult]()
    with TemporaryDirectory(prefix="dmt-rehearse-") as folder:
        for item in run(rehearsal, chosen, options, Path(folder)):
            report(item)
            if isinstance(item, Record):
                reference = item
            else:
                results.append(item)
    return RehearsalResult(rehearsal, reference, tuple(results))


def prepare(recipe: Recipe, options: Options) -> Rehearsal:
    """Shrink a recipe and list its layouts.

    Raises PlanError or RecipeError when the recipe itself cannot be planned.
    """
    recipe = adopt_engine_config(recipe)
    recipe = recipe.with_values({"model.config": model_config(recipe.model)})
    plan = plan_recipe(recipe, explained=False)
    own = recipe.with_values({"parallel.outer": None})
    layouts = tuple(candidates(own, plan, options.processes))
    small = shrink_recipe(recipe, plan, options.steps, rehearsed_batch(layouts))
    return Rehearsal(small, plan, recipe, layouts)


def rehearsed_batch(layouts: Sequence[RehearsedLayout]) -> int:
    """The smallest number of sequences from LEAST_BATCH on that every layout can split.

    An interleaved pipeline takes micro batches in groups of one per stage.
    """
    unit = 1
    for one in layouts:
        section, stages = one.parallel, int(one.parallel.pipeline)
        ranks = one.processes // (int(section.tensor) * stages * int(section.context))
        group = stages if section.virtual_pipeline != 1 else 1
        unit = lcm(unit, MICRO_BATCH * ranks * group)
    return -(-LEAST_BATCH // unit) * unit


def shrink_recipe(recipe: Recipe, plan: Plan, steps: int, batch: int) -> Recipe:
    """The recipe as it is rehearsed: small, fp32, without dropout, nothing saved or logged.

    `batch` is the number of sequences per step. The learning rate is the recipe's peak in every
    step, up to a limit: a rehearsal that only warms up would hardly change the weights. The
    objective is one that the reference also defines: engines do not depend on it, and the
    inputs of another package's objective are not in a rehearsal's batches.
    """
    from toolkit.rehearse.losses import rehearsed_objective  # imports torch

    divisors = degrees(plan)
    long = recipe.training.sequence_length
    short = shrink_sequence(long, divisors)
    assert recipe.model.config is not None, "looked up by `prepare`"
    config = shrink_config(without_noise(recipe.model.config), divisors)
    config = shrink_window(config, long, short)
    freeze = shrink_freeze(recipe.model.freeze, config)
    trained = trained_tensors(config, freeze, recipe.adapter)
    groups = in_small_model(recipe.optimizer.groups, trained)
    largest = recipe.optimizer.kind.largest_rate / max(
        [1.0, *(group.lr_mult for group in groups)]
    )
    adapter = recipe.adapter
    if adapter is not None:
        adapter = adapter.with_values({"dropout": 0.0, "folder": None})
    return recipe.with_values(
        {
            "adapter": adapter,
            "parallel.outer": None,
            "model.hub": None,
            "model.revision": None,
            "model.init": "random",
            "model.config": config,
            "model.freeze": freeze,
            "data.stages": (),
            "training.steps": steps,
            "training.tokens": None,
            "training.epochs": None,
            "training.sequence_length": short,
            "training.global_batch_size": batch,
            "training.batch_ramp": None,
            "training.micro_batch_size": MICRO_BATCH,
            "training.precision": "fp32",
            "training.objective": rehearsed_objective(recipe),
            "optimizer.learning_rate": min(recipe.optimizer.learning_rate, largest),
            "optimizer.groups": groups,
            "kernels.loss": "chunked" if plan.layout.loss == "liger" else plan.layout.loss,
            "kernels.attention": "auto",
            "schedule": ScheduleSection(name="constant"),
            "evaluation": EvaluationSection(),
            "checkpoint": CheckpointSection(export=False),
            "logging": LoggingSection(),
        }
    )


def run(
    rehearsal: Rehearsal, chosen: Sequence[RehearsedLayout], options: Options, folder: Path
) -> Iterator[Record | LayoutResult]:
    """Run the reference, then each chosen layout in turn; yields each when it is done.

    The first item is the reference's record. Every layout works under `folder`. Raises
    RunFailed when the reference fails: there is then nothing to compare with;
    BackendUnavailable without a package that the optimizer needs.
    """
    reference = run_reference(rehearsal, options, folder / "reference")
    yield reference
    for candidate in chosen:
        at = folder / candidate.name
        yield run_layout(rehearsal.recipe, candidate, reference, options, at)


def run_reference(rehearsal: Rehearsal, options: Options, folder: Path) -> Record:
    """Train with transformers alone, in one process on the CPU. Raises as `run` does."""
    optimizer = rehearsal.recipe.optimizer
    if optimizer.kind.packages and optimizer.kind.whole is not None:
        load(optimizer.kind.whole.rule)(optimizer)  # one clear error where they are missing
    # A separate loop trains it: any engine without a configuration is a placeholder.
    plain = next(name for name in BACKENDS.names if not BACKENDS[name].configured)
    section = ParallelSection(engine=plain, model="hf")
    write(_assignment(rehearsal.recipe, section, 1, folder), ["dmt", "rehearse"])
    spec = launch_spec(folder, 1, ["-m", "toolkit.rehearse.reference", str(folder)])
    failure = run_ranks(spec, options.limit_s)
    if failure is not None:
        raise RunFailed(f"the reference failed: {failure.why}\n{failure.log}")
    return read_record(folder)


def run_layout(
    recipe: Recipe,
    candidate: RehearsedLayout,
    reference: Record,
    options: Options,
    folder: Path,
    bounds: Bounds | None = None,
) -> LayoutResult:
    """Train one layout of a small recipe in its own processes and compare it, unless it cannot
    be run. `bounds`: by default those of fp32 on the CPU."""
    if candidate.processes > options.processes:
        why = f"needs {candidate.processes} processes, --processes is {options.processes}"
        return LayoutResult(candidate, skipped=why)
    try:
        assignment = _assignment(
            recipe, candidate.parallel, candidate.processes, folder, options.gpu
        )
    except (PlanError, RecipeError) as error:
        return LayoutResult(candidate, skipped=_reason(error))
    plan = assignment.plan
    try:
        assignment.prepare(tell)
    except BackendUnavailable as error:
        return LayoutResult(candidate, plan, skipped=error.message)
    write(assignment, ["dmt", "rehearse"])
    worker = ["-m", options.worker, str(folder)]
    spec = launch_spec(folder, candidate.processes, worker, options.gpu)
    failure = run_ranks(spec, options.limit_s)
    record = read_record(folder)
    if failure is not None:
        return LayoutResult(candidate, plan, record, failure=failure)
    comparison = compare(record, reference, bounds or tolerance(plan.layout))
    return LayoutResult(candidate, plan, record, comparison)


def _assignment(
    recipe: Recipe, parallel: ParallelSection, processes: int, folder: Path, gpu: str = "cpu"
) -> Assignment:
    """The recipe in one layout, checked and planned as `dmt check` would."""
    if parallel.zero.nvme_path is not None:
        swap = folder / "swap"
        swap.mkdir(parents=True, exist_ok=True)
        parallel = parallel.with_values({"zero.nvme_path": str(swap)})
    cluster = ClusterSection(nodes=1, gpus_per_node=processes, gpu=gpu)
    if parallel.stages:
        parallel = parallel.with_values({"stages": _small_stages(recipe, parallel)})
    wanted = recipe.model_copy(update={"parallel": parallel, "cluster": cluster})
    if parallel.context == 1:
        wanted = wanted.with_values({"kernels.context": "auto"})
    if problems := list(broken_rules(wanted)):
        raise RecipeError(problems)
    return decide(wanted, folder)


def _small_stages(recipe: Recipe, parallel: ParallelSection) -> tuple[int, ...]:
    """An uneven division of the small model, whatever that of the recipe's own is."""
    layers = model_spec(model_config(recipe.model)).layers
    chunks = int(parallel.pipeline) * int(parallel.virtual_pipeline)
    return (layers - chunks + 1, *(1,) * (chunks - 1))


def _reason(error: PlanError | RecipeError) -> str:
    if not isinstance(error, RecipeError):
        return error.message
    return "; ".join(f"{p.key}: {p.found}; allowed: {p.allowed}" for p in error.problems)
