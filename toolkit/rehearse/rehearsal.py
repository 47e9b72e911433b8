"""The rehearsal: trains a small recipe in each layout and compares the results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path
from tempfile import TemporaryDirectory

from toolkit.backend import BACKENDS, adopt_engine_config
from toolkit.errors import BackendUnavailable, PlanError, RecipeError, RunFailed
from toolkit.intake.checks import broken_rules
from toolkit.models.families import model_spec
from toolkit.models.hub import model_config
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import ClusterSection, ParallelSection, Recipe
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
from toolkit.rehearse.layouts import RehearsedLayout, candidates, select
from toolkit.rehearse.ranks import launch_spec, run_ranks
from toolkit.rehearse.shrink import MICRO_BATCH, shrink_recipe
from toolkit.run.assignment import Assignment, decide, write
from toolkit.text.terminal import tell

LEAST_BATCH = 8
"""Sequences per step: two data-parallel ranks with two micro batches of two, or four
micro batches for a pipeline. More only where a pipeline asks for it."""


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
    """The layouts' device, by its name in the hardware catalogue. The reference runs on the
    CPU."""


@dataclass(frozen=True)
class LayoutResult:
    """The result of one layout."""

    candidate: RehearsedLayout
    verdict: Verdict
    """A layout that failed has diverged."""
    why: str = ""
    """The reason of the verdict, on one line. Empty where everything is the same."""
    plan: Plan | None = None
    """None if the layout is not legal for this recipe."""
    record: Record = field(default_factory=Record)
    comparison: Comparison | None = None
    """None for a layout that was skipped or failed."""
    log: str = ""
    """The end of a failed rank's output."""


@dataclass(frozen=True)
class Rehearsal:
    """A recipe made small, and the layouts to try it in."""

    recipe: Recipe
    """The small one. Its `parallel` section is replaced by each layout's."""
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
    report: Callable[[Record | LayoutResult], object] = lambda _: None,
) -> RehearsalResult:
    """Train a small copy in every layout that this machine's CPUs can run, and compare.

    `layouts`: names or globs, such as `zero*`. Default: all. Raises as `prepare`, `select` and
    `run` do.
    """
    options = Options(steps, processes, time_limit_s)
    rehearsal = prepare(recipe, options)
    return run(rehearsal, select(rehearsal.layouts, layouts), options, report)


def prepare(recipe: Recipe, options: Options) -> Rehearsal:
    """Shrink a recipe and list its layouts.

    Raises PlanError or RecipeError when the recipe itself cannot be planned.
    """
    recipe = adopt_engine_config(recipe)
    recipe = recipe.with_values({"model.config": model_config(recipe.model)})
    plan = plan_recipe(recipe, explained=False)
    layouts = tuple(candidates(recipe, plan, options.processes))
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


def run(
    rehearsal: Rehearsal,
    chosen: Sequence[RehearsedLayout],
    options: Options,
    report: Callable[[Record | LayoutResult], object] = lambda _: None,
) -> RehearsalResult:
    """Run the reference, then each chosen layout in turn.

    `report` is called with the reference's record and each layout's result, as soon as it is
    there. Raises RunFailed when the reference fails: there is then nothing to compare with;
    BackendUnavailable without a package that the optimizer needs.
    """
    results = []
    with TemporaryDirectory(prefix="dmt-rehearse-") as name:
        folder = Path(name)
        reference = run_reference(rehearsal, options, folder / "reference")
        report(reference)
        for candidate in chosen:
            at = folder / candidate.name
            results.append(run_layout(rehearsal.recipe, candidate, reference, options, at))
            report(results[-1])
    return RehearsalResult(rehearsal, reference, tuple(results))


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
        return LayoutResult(candidate, "skipped", why)
    try:
        assignment = _assignment(
            recipe, candidate.parallel, candidate.processes, folder, options.gpu
        )
    except (PlanError, RecipeError) as error:
        return LayoutResult(candidate, "skipped", _reason(error))
    plan = assignment.plan
    try:
        assignment.prepare(tell)
    except BackendUnavailable as error:
        return LayoutResult(candidate, "skipped", error.message, plan)
    write(assignment, ["dmt", "rehearse"])
    worker = ["-m", options.worker, str(folder)]
    spec = launch_spec(folder, candidate.processes, worker, options.gpu)
    failure = run_ranks(spec, options.limit_s)
    record = read_record(folder)
    if failure is not None:
        done = len(record.loss)
        why = f"failed{f' after step {done}' if done else ''}: {failure.why}"
        return LayoutResult(candidate, "diverged", why, plan, record, log=failure.log)
    found = compare(record, reference, bounds or tolerance(plan.layout))
    return LayoutResult(candidate, found.verdict, str(found.first or ""), plan, record, found)


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
