"""`dmt launch`: plan a recipe, write its run directory, start the workers, wait."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from toolkit.cli.options import ClusterOption, Overrides, RecipePath, RunDir, load_on
from toolkit.hardware.cluster import Cluster
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.layers import stated_in
from toolkit.launcher import LAUNCHERS, listed
from toolkit.launchers.base import LaunchSpec, Starter, starter
from toolkit.launchers.job import job_of
from toolkit.launchers.process import StopSignals
from toolkit.launchers.supervisor import newest_step, supervise, visible_gpus, working_gpus
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
from toolkit.run.events import EventLog, process_age_s
from toolkit.targets import preflight
from toolkit.text.terminal import lost_output, survive_lost_output, tell

Changes = Annotated[
    list[str],
    typer.Option(
        "--change",
        metavar="KEY=VALUE",
        help="Continue the run with another learning rate, weight decay, gradient clipping or "
        "schedule; its optimizer states are kept, and the change is recorded.",
    ),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Start a run that failed again from its last checkpoint, up to N times in a row "
        "without a new checkpoint; default: the recipe's launch.max_restarts (0)",
    ),
]


def launch(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    run_dir: RunDir = None,
    launcher: Annotated[
        str | None,
        typer.Option(help=f"{listed(LAUNCHERS.names)}; default: the recipe's launch.launcher"),
    ] = None,
    max_restarts: MaxRestarts = None,
    change: Changes = [],  # noqa: B006
    cluster: ClusterOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print plan and command; write and start nothing.")
    ] = False,
) -> None:
    """Train a recipe: on this machine, on several, or as a job of a scheduler.

    Example: dmt launch recipes/tiny/llama-bytes.yaml --set training.steps=20

    Example: dmt launch recipes/llama/llama-3.1-8b-pretrain.yaml --launcher slurm --dry-run
    """
    survive_lost_output()
    if launcher is not None:
        overrides = [*overrides, f"launch.launcher={launcher}"]
    if max_restarts is not None:
        overrides = [*overrides, f"launch.max_restarts={max_restarts}"]
    overrides = [*overrides, *change]
    where = None if cluster is None else find_cluster(cluster)
    loaded = load_on(recipe, overrides, where)
    assignment = decide(loaded, run_dir, where)
    spec = _spec(assignment, where)
    show_plan(assignment.recipe, assignment.plan)
    name, nodes = assignment.recipe.launch.launcher, assignment.recipe.cluster.nodes
    oversees = LAUNCHERS[name].supervises(nodes)
    if oversees:  # Otherwise that is done where the ranks are.
        preflight(assignment.recipe, assignment.plan, "launch", tell)
    if dry_run:
        tell(spec.printable(), sys.stdout)
        return
    check_local_files(assignment.recipe, recipe, overrides)
    _request(change, assignment)
    if oversees:
        places = stated_in(recipe, overrides)
        code = _oversee(starter(name), assignment, spec, loaded, where, places)
    else:
        code = _hand_over(starter(name), assignment, spec)
    raise typer.Exit(code)


def _request(change: Sequence[str], assignment: Assignment) -> None:
    """Record what `--change` names, which lets the run continue with it."""
    run = RunDirectory(assignment.run_dir)
    if keys := [one.partition("=")[0] for one in change]:
        request_changes(run, assignment.recipe, keys, newest_step(run.checkpoints))


def _oversee(
    launcher: Starter,
    assignment: Assignment,
    spec: LaunchSpec,
    loaded: Recipe,
    where: Cluster | None,
    places: Mapping[str, str],
) -> int:
    """Write the run directory, start the ranks, and supervise them to the end."""
    assignment.prepare(tell)
    run = write(assignment, ["dmt", *sys.argv[1:]], places)
    show_run_directory(run)
    events = EventLog(run.events)
    events.write("launch", time=time.time() - process_age_s())
    section = assignment.recipe
    ranks = f"{section.cluster.world_size} ranks ({section.launch.launcher})"
    tell(f"starting {ranks}: loading the libraries")
    for lost in lost_output():  # the ranks inherit what is left of it
        events.write("warning", source="output", message=lost)
    return supervise(
        launcher,
        spec,
        lambda: _spec(_still_possible(assignment, loaded, where), where),
        assignment.recipe.launch.max_restarts,
    )


def _hand_over(launcher: Starter, assignment: Assignment, spec: LaunchSpec) -> int:
    """Start this machine's part, or queue the job: others supervise the run."""
    refuse_other_run(RunDirectory(assignment.run_dir), assignment.recipe)
    spec.write_files()
    with StopSignals() as signals:
        return launcher.run(spec, signals).exit_code


def _spec(assignment: Assignment, where: Cluster | None) -> LaunchSpec:
    """What is started now: each time on a free port."""
    return starter(assignment.recipe.launch.launcher).spec(
        job_of(assignment, settle=where is not None)
    )


def _still_possible(
    assignment: Assignment, recipe: Recipe, where: Cluster | None
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
        write(assignment, ["dmt", *sys.argv[1:]])
    return assignment
