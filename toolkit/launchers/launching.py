"""Launching a recipe: plan, run directory, processes, restarts.

`dmt launch` is `launch_recipe` with a command line.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from toolkit.errors import EXIT_DONE, EXIT_RESUMABLE, RunFailed, Stopped
from toolkit.foreign import preflight
from toolkit.hardware.cluster import Cluster
from toolkit.hardware.cluster_file import find_cluster
from toolkit.launcher import LAUNCHERS
from toolkit.launchers.base import LaunchSpec, starter
from toolkit.launchers.gpus import visible_gpus, working_gpus
from toolkit.launchers.job import job_of
from toolkit.launchers.outcome import newest_step
from toolkit.launchers.process import StopSignals
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe
from toolkit.run.announce import show_plan, show_run_directory
from toolkit.run.assignment import (
    Assignment,
    check_local_files,
    decide,
    decide_for_fewer,
    write,
)
from toolkit.run.directory import RunDirectory, refuse_other_run, request_changes
from toolkit.run.events import EventLog
from toolkit.text.terminal import lost_output, tell


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

    def check(self, recipe: Recipe) -> None:
        """Raises RecipeError for local files that are missing or cannot be used."""
        check_local_files(recipe, self.path, self.overrides)


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
        recipe: From `load_recipe`; with a `cluster`, loaded for that one.
        run_dir: Default: `runs/NAME`. A run that is there is continued.
        cluster: As `--cluster`, e.g. for measured speeds; default: the recipe's.
        dry_run: Plan and return the command; write and start nothing.
        check: Raise for a run that failed, as `subprocess.run` does; else see `exit_code`.
        changes: Settings that may differ from the run that is continued (`--change`).
        origin: Where the recipe comes from, for messages and reports.

    Raises RunFailed, or Stopped after a signal, if `check`; RecipeError, PlanError,
    BackendUnavailable or DirectoryInUse before anything starts.
    """
    where = None if cluster is None else find_cluster(cluster)
    origin = origin or Origin()
    assignment = decide(recipe, None if run_dir is None else Path(run_dir), where)
    spec = _spec(assignment, where)
    show_plan(assignment.recipe, assignment.plan)
    launch, nodes = assignment.recipe.launch, assignment.recipe.cluster.nodes
    name, nodes = launch.launcher, launch.most_nodes(nodes)
    oversees = LAUNCHERS[name].supervises(nodes)
    if oversees:  # Otherwise that is done where the ranks are.
        preflight(assignment.recipe, "launch")
    code = EXIT_DONE
    if not dry_run:
        origin.check(assignment.recipe)
        _request(changes, assignment)
        if oversees:
            _prepare(assignment, origin)
            spec = replace(spec, again=lambda: _again(assignment, recipe, where, origin))
        else:  # a scheduler, or the machines together
            refuse_other_run(RunDirectory(assignment.run_dir), assignment.recipe)
        spec.write_files()
        with StopSignals() as signals:
            code = starter(name).run(spec, signals).exit_code
    command = spec.printable()
    result = LaunchResult(assignment.run_dir, assignment.plan, command, code)
    if check and code != EXIT_DONE:
        if code == EXIT_RESUMABLE:
            raise Stopped(f"{result.run_dir}: stopped after saving", fix="launch it again")
        raise RunFailed(
            f"{result.run_dir}: the run failed", fix=f"its logs are in {result.run_dir}/logs"
        )
    return result


def _request(changes: Sequence[str], assignment: Assignment) -> None:
    """Record what `--change` names, which lets the run continue with it."""
    run = RunDirectory(assignment.run_dir)
    if changes:
        request_changes(run, assignment.recipe, changes, newest_step(run))


def _prepare(assignment: Assignment, origin: Origin) -> None:
    """Write the run directory for ranks that are about to start."""
    assignment.prepare(tell)
    run = write(assignment, origin.command)
    show_run_directory(run)
    events = EventLog(run.events)
    events.write("launch", time=origin.started)
    section = assignment.recipe
    ranks = f"{section.cluster.world_size} ranks ({section.launch.launcher})"
    tell(f"starting {ranks}: loading the libraries")
    for lost in lost_output():  # the ranks inherit what is left of it
        events.write("warning", source="output", message=lost)


def _spec(assignment: Assignment, where: Cluster | None) -> LaunchSpec:
    """What is started now: each time on a free port."""
    return starter(assignment.recipe.launch.launcher).spec(
        job_of(assignment, settle=where is not None)
    )


def _again(
    assignment: Assignment, recipe: Recipe, where: Cluster | None, origin: Origin
) -> LaunchSpec:
    """What is started after a failure; its files are written."""
    spec = _spec(_still_possible(assignment, recipe, where, origin.command), where)
    spec.write_files()
    return spec


def _still_possible(
    assignment: Assignment, recipe: Recipe, where: Cluster | None, command: Sequence[str]
) -> Assignment:
    """The assignment, or after a loss of devices, one for the remaining ones."""
    planned = recipe.cluster.gpus_per_node
    if recipe.cluster.gpu == "cpu":
        return assignment
    visible, names = visible_gpus(planned), working_gpus(planned)
    if names != visible:
        # All that work: ranks take the first ones, and the others are there next time.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    if len(names) < planned:
        tell(f"{len(names)} of {planned} GPUs work: planning again, same global batch")
        assignment = decide_for_fewer(recipe, assignment.run_dir, where, len(names))
        show_plan(assignment.recipe, assignment.plan)
        write(assignment, command)
    return assignment
