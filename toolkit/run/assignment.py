"""The assignment of a run's ranks: recipe, plan and backend configuration, created once."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit.backend import BACKENDS, adopt_engine_config
from toolkit.checkpoint.checkpoints import locate
from toolkit.data.local import local_problems
from toolkit.errors import (
    BackendUnavailable,
    CheckpointError,
    DmtError,
    PlanError,
    Problem,
    RecipeError,
)
from toolkit.foreign import preflight
from toolkit.intake.load import load_recipe, placed
from toolkit.launchers import LAUNCHERS
from toolkit.models.hub import dataset_commit
from toolkit.plan.estimate import estimate_plan, memory_parts
from toolkit.plan.hardware.cluster import Cluster
from toolkit.plan.plan import Plan
from toolkit.plan.planner import placed_on, plan_recipe
from toolkit.recipe.places import is_remote
from toolkit.recipe.schema import Recipe, RowsSource, Source
from toolkit.run.announce import short, show_plan
from toolkit.run.claim import refuse_if_claimed
from toolkit.run.comparison import Prediction
from toolkit.run.directory import RunDirectory
from toolkit.system.compilers import missing_for_torch_compile
from toolkit.system.untrusted import parse_mapping, read_bytes, read_json
from toolkit.text.terminal import tell
from toolkit.text.units import GIB

MEETING = "DMT_ELASTIC_MEETING"
"""Variable with the number, from 0, of the meeting of elastic agents or Ray's workers that
started these ranks. Unset under other launchers."""
CUT_OFF_LIMITS = 4
"""Time limits (`launch.hang_timeout_s`) after which a rank that was cut off has ended: three in
its first step, and a while to look at the others."""


@dataclass(frozen=True)
class Assignment:
    """One run, decided."""

    recipe: Recipe
    plan: Plan
    engine_config: dict[str, Any]
    """The backend's rendered configuration. Empty for an engine without one."""
    run_dir: Path
    prediction: Prediction
    """The plan's prediction, which is compared at the end of the run."""
    predicted_parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Parts of the predicted `memory_gib` and `step_time_s`, for reports."""

    def prepare(self, report: Callable[[str], None]) -> None:
        """Check for and build what its engine, or torch.compile, compiles on this machine.

        Raises BackendUnavailable naming what is missing and how to get it.
        """
        BACKENDS[self.plan.engine].prepare(self.engine_config, report)
        layout = self.plan.layout
        if layout.compiles is None:
            return
        on_gpu = self.recipe.cluster.gpu != "cpu"
        if missing := missing_for_torch_compile(on_gpu=on_gpu):
            raise BackendUnavailable(
                f"kernels.{layout.compiles}: {'; '.join(one.what for one in missing)}",
                fix="; ".join([*(one.fix for one in missing), "or set it to none"]),
            )


def decide(
    recipe: Recipe,
    run_dir: Path | None,
    cluster: Cluster | None = None,
    *,
    download: bool = True,
    explained: bool = True,
) -> Assignment:
    """Plan a recipe and render its backend's configuration. Writes nothing.

    With a `cluster`, the recipe runs there instead of on its own. Without `download`, no
    commit of a data set is looked up. `explained`: see `plan_of`.
    """
    recipe = adopt_engine_config(recipe)
    run_dir = (run_dir or Path("runs") / recipe.name).absolute()
    before = _recorded(run_dir)
    recipe = _with_start(recipe, before)
    if download:
        recipe = _with_commits(recipe, before)
    if cluster is not None:
        recipe = placed_on(recipe, cluster)
    plan = plan_recipe(recipe, cluster, explained=explained)
    found = estimate_plan(recipe, plan, cluster)
    memory = found.memory
    return Assignment(
        recipe,
        plan,
        BACKENDS[plan.engine].render(recipe, plan.layout),
        run_dir,
        Prediction(
            step_time_s=found.time.total_s,
            memory_gib=memory.allocated / GIB,
            basis=found.setup.cluster.basis,
            reserved_gib=memory.reserved / GIB,
            outside_gib=memory["context"] / GIB,
        ),
        {"memory_gib": memory_parts(memory), "step_time_s": found.time.parts},
    )


def _recorded(run_dir: Path) -> Recipe | None:
    """The recipe of the directory's run. None before it has begun."""
    recipe = RunDirectory(run_dir).recipe
    with suppress(DmtError):
        return load_recipe(recipe) if recipe.exists() else None
    return None


def _with_start(recipe: Recipe, before: Recipe | None) -> Recipe:
    """The recipe with the exact checkpoint that it starts from: restarts must use the same one,
    even if that run has saved more, or was deleted, meanwhile.

    Raises RecipeError when there is none.
    """
    model = recipe.model
    if model.checkpoint is None or not LAUNCHERS[recipe.launch.launcher].same_files:
        return recipe
    stated, chosen = Path(model.checkpoint), before.model.checkpoint if before else None
    if chosen is None or stated not in (Path(chosen), *Path(chosen).parents):
        try:
            chosen = str(locate(stated).folder)
        except CheckpointError as error:
            allowed = "a finished checkpoint, or a run directory with one"
            problem = Problem("model.checkpoint", error.message, allowed, error.fix)
            raise RecipeError([problem]) from error
    return recipe.with_values({"model.checkpoint": chosen})


def _with_commits(recipe: Recipe, before: Recipe | None) -> Recipe:
    """The recipe with the newest commit of every data set of the hub that states no revision:
    what is committed later must not change the data of a run. A run keeps what it began with.
    """
    stated: dict[str, str | None] = {}
    if before is not None:
        sources = (*before.data.sources, *before.data.validation_sources)
        rows = (source for source in sources if isinstance(source, RowsSource))
        stated = {source.path: source.revision for source in rows}

    def pinned(source: Source) -> Source:
        if not isinstance(source, RowsSource) or source.revision or not _of_hub(source.path):
            return source
        if source.path not in stated:
            stated[source.path] = dataset_commit(source.path)
        return source.with_values({"revision": stated[source.path]})

    values = {}
    for name in ("train", "validation"):
        found = getattr(recipe.data, name)
        if found is not None:
            several = isinstance(found, tuple)
            values[f"data.{name}"] = tuple(map(pinned, found)) if several else pinned(found)
    return recipe.with_values(values)


def _of_hub(path: str) -> bool:
    """Whether a loaded recipe's path is a hub id. Local paths in it are absolute."""
    return not (is_remote(path) or path.startswith(("/", "~")) or Path(path).exists())


def write(assignment: Assignment, command: Sequence[str]) -> RunDirectory:
    """Write the run directory, or continue the one that is there.

    Raises DirectoryInUse, with nothing written, when a run is using it.
    """
    # The rank 0 of a machine that was cut off holds the directory until its time limit ends it.
    again = os.environ.get(MEETING, "0") != "0"
    patience_s = CUT_OFF_LIMITS * assignment.recipe.launch.hang_timeout_s if again else 0
    refuse_if_claimed(RunDirectory(assignment.run_dir), patience_s)
    return RunDirectory.create(
        assignment.run_dir,
        assignment.recipe,
        {
            **assignment.plan.to_dict(),
            "predicted": asdict(assignment.prediction),
            "predicted_parts": assignment.predicted_parts,
        },
        command,
        assignment.engine_config,
    )


def read_assignment(path: Path, world: int) -> Assignment:
    """Read what `write` wrote, for `world` ranks.

    Raises PlanError when `path` is not a run directory or was planned for other ranks.
    """
    run = RunDirectory(path.absolute())
    try:
        fields = parse_mapping(read_bytes(run.plan))
        prediction = Prediction(**fields.pop("predicted"))
        fields.pop("predicted_parts")
        plan = Plan.from_dict(fields)
        configured = BACKENDS[plan.engine].configured
        config = read_json(run.engine_config(plan.engine)) if configured else {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PlanError(
            f"{path} is not a run directory: {error}",
            fix="`dmt launch RECIPE` writes one and starts it",
        ) from error
    recipe = load_recipe(run.recipe)
    if _came_back_resized(recipe, world):
        return _assign_anew(recipe, run.path, ["dmt", *sys.argv[1:]], world)
    check_world(recipe, world)
    return Assignment(recipe, plan, config, run.path, prediction)


def assign(
    recipe_path: Path,
    overrides: Sequence[str],
    run_dir: Path | None,
    command: Sequence[str],
    world: int,
) -> Assignment:
    """Plan, and write the run directory, for `world` ranks that another launcher started.

    Raises PlanError if the recipe's cluster has another number of ranks. Also if the
    environment contradicts the recipe in a way that would corrupt the run.
    """
    recipe = load_recipe(recipe_path, overrides)
    if _came_back_resized(recipe, world):
        return _assign_anew(recipe, run_dir, command, world)
    check_world(recipe, world)
    assignment = decide(recipe, run_dir)
    check_local_files(recipe, recipe_path, overrides)
    run = RunDirectory(assignment.run_dir)
    # What `dmt launch` left for the ranks, it has shown itself.
    if recipe_path.absolute() != run.handed_over and not elastic_restarts():
        show_plan(assignment.recipe, assignment.plan)
    preflight(assignment.recipe, "worker")
    tell(f"run directory {short(write(assignment, command).path)}")
    return assignment


def check_local_files(
    recipe: Recipe, path: Path | None = None, overrides: Sequence[str] = ()
) -> None:
    """Raise RecipeError for files of the recipe that are missing here or cannot be used. Given
    `path` and `overrides`, errors state the lines that name them."""
    problems = [*local_problems(recipe)]
    if path is not None:
        problems = [placed(one, path, overrides) for one in problems]
    if problems:
        raise RecipeError(problems)


def elastic_restarts() -> int:
    """How often torchrun's agents or Ray have restarted these ranks. 0 under others."""
    counted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    return max(counted, int(os.environ.get(MEETING, 0)))


def _came_back_resized(recipe: Recipe, world: int) -> bool:
    """Whether an elastic agent started another number of ranks than the recipe has, which it
    admits (`launch.elastic`) or which are left of it (`torchrun --nnodes MIN:MAX`)."""
    elastic, cluster = recipe.launch.elastic, recipe.cluster
    if cluster.world_size == world:
        return False
    nodes = world / cluster.gpus_per_node  # torchrun may start another number on each
    admitted = elastic and elastic.min_nodes <= nodes <= elastic.max_nodes
    return bool(admitted) or elastic_restarts() > 0


def _assign_anew(
    recipe: Recipe, run_dir: Path | None, command: Sequence[str], world: int
) -> Assignment:
    """Plan for the available ranks, with the same global batch."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % per_node:
        per_node = 1  # Machines with unequal numbers: nothing may rely on being on one.
    before = recipe.cluster.world_size
    there = {"cluster.nodes": world // per_node, "cluster.gpus_per_node": per_node}
    assignment = decide(recipe.with_values(there), run_dir)
    write(assignment, command)
    tell(f"dmt: {world} ranks instead of {before}: planned again")
    show_plan(assignment.recipe, assignment.plan)
    return assignment


def check_world(recipe: Recipe, world: int) -> None:
    """Raises PlanError when the recipe's cluster has not `world` processes."""
    cluster = recipe.cluster
    if cluster.world_size != world:
        raise PlanError(
            f"the recipe's cluster has {cluster.nodes} node(s) with {cluster.gpus_per_node} "
            f"process(es) each, the launcher started {world}",
            fix="start as many, or --set cluster.nodes=N --set cluster.gpus_per_node=M "
            "(accelerate on CPUs starts one without --config_file: docs/launchers.md)",
        )
