"""Launching a recipe: plan, run directory, processes, restarts.

`dmt launch` is `launch_recipe` with a command line.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.errors import EXIT_DONE, EXIT_RESUMABLE, RunFailed, Stopped
from toolkit.foreign import preflight
from toolkit.launchers import LAUNCHERS
from toolkit.launchers.base import starter
from toolkit.launchers.job import job_of
from toolkit.launchers.outcome import newest_step
from toolkit.launchers.process import StopSignals
from toolkit.plan.hardware.cluster import Cluster
from toolkit.plan.hardware.cluster_file import find_cluster
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe
from toolkit.run.announce import short, show_plan
from toolkit.run.assignment import Assignment, check_local_files, decide, write
from toolkit.run.directory import RunDirectory, refuse_other_run, request_changes
from toolkit.run.events import EventLog
from toolkit.text.terminal import tell


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended."""

    run_dir: Path
    """Metrics, checkpoints, export and logs: see the run directory in docs/architecture.md."""
    plan: Plan
    command: str
    """What was started, as shell commands."""
    exit_code: int = EXIT_DONE
    """As of `dmt launch`: 0, 4 (failed), 75 (stopped after saving; launch again to resume)."""


@dataclass(frozen=True)
class Origin:
    """Where a recipe comes from: errors name its lines, and reports what was typed."""

    path: Path | None = None
    overrides: Sequence[str] = ()
    command: Sequence[str] = field(default_factory=lambda: [sys.executable, *sys.argv])
    started: float = field(default_factory=time.time)
    """When the launch began, in seconds since the epoch."""


def launch_recipe(
    recipe: Recipe,
    run_dir: str | Path | None = None,
    cluster: str | Cluster | None = None,
    *,
    dry_run: bool = False,
    check: bool = True,
    changes: Sequence[str] = (),
    origin: Origin | None = None,
) -> LaunchResult:
    """Train a recipe with its `launch.launcher` and wait, or queue it as a scheduler's job.

    Call it from the main thread: signals stop the run. Progress goes to standard error.

    Args:
        recipe: From `load_recipe`. With a `cluster`, loaded for that one.
        run_dir: Default: `runs/NAME`. A run that is there is continued.
        cluster: As `--cluster`, e.g. for measured speeds. Default: the recipe's.
        dry_run: Plan and return the command. Write and start nothing.
        check: Raise for a run that failed, as `subprocess.run` does; else see `exit_code`.
        changes: Settings that may differ from the run that is continued (`--change`).
        origin: Where the recipe comes from, for messages and reports.

    Raises RunFailed, or Stopped after a signal, if `check`; RecipeError, PlanError,
    BackendUnavailable or DirectoryInUse before anything starts.
    """
    where = None if cluster is None else find_cluster(cluster)
    origin = origin or Origin()
    assignment = decide(recipe, None if run_dir is None else Path(run_dir), where)
    name = assignment.recipe.launch.launcher
    spec = starter(name).spec(job_of(assignment, settle=where is not None))
    show_plan(assignment.recipe, assignment.plan)
    nodes = assignment.recipe.launch.most_nodes(assignment.recipe.cluster.nodes)
    oversees = LAUNCHERS[name].supervises(nodes)
    if oversees:  # Otherwise that is done where the ranks are.
        preflight(assignment.recipe, "launch")
    code = EXIT_DONE
    if not dry_run:
        run = RunDirectory(assignment.run_dir)
        check_local_files(assignment.recipe, origin.path, origin.overrides)
        if changes:
            request_changes(run, assignment.recipe, changes, newest_step(run))
        if oversees:
            _prepare(assignment, origin)
        else:  # a scheduler, or the machines together
            refuse_other_run(run, assignment.recipe)
        spec.write_files()
        with StopSignals() as signals:
            code = starter(name).run(spec, signals)
    command = spec.printable()
    result = LaunchResult(assignment.run_dir, assignment.plan, command, code)
    if check and code != EXIT_DONE:
        if code == EXIT_RESUMABLE:
            raise Stopped(f"{result.run_dir}: stopped after saving", fix="launch it again")
        raise RunFailed(
            f"{result.run_dir}: the run failed", fix=f"its logs are in {result.run_dir}/logs"
        )
    return result


def _prepare(assignment: Assignment, origin: Origin) -> None:
    """Write the run directory for ranks that are about to start."""
    assignment.prepare(tell)
    run = write(assignment, origin.command)
    tell(f"run directory {short(run.path)}")
    EventLog(run.events).write("launch", time=origin.started)
    section = assignment.recipe
    ranks = f"{section.cluster.world_size} ranks ({section.launch.launcher})"
    tell(f"starting {ranks}: loading the libraries")
