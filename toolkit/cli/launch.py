"""`dmt launch`: plan a recipe, write its run directory, start the workers, wait."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.options import ClusterOption, Overrides, RecipePath, RunDir, load_on
from toolkit.cli.plan import ledger_of
from toolkit.errors import EXIT_DONE, EXIT_RESUMABLE
from toolkit.hardware.cluster_file import find_cluster
from toolkit.launchers import LAUNCHERS
from toolkit.launchers.outcome import events_offset
from toolkit.plan.ledger import summary
from toolkit.redact import redact
from toolkit.train import jsonl
from toolkit.train.comparison import told
from toolkit.train.run_dir import RunDirectory


def launch(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    run_dir: RunDir = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            help="local, torchrun or deepspeed; default: the recipe's launch.launcher"
        ),
    ] = None,
    cluster: ClusterOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print plan and command; write and start nothing.")
    ] = False,
) -> None:
    """Train a recipe on this machine.

    Example: dmt launch recipes/tiny/llama-bytes.yaml --set training.steps=20
    """
    from toolkit.engines.setup import environment, prepare_ops
    from toolkit.train import assignment as assignments

    if launcher is not None:
        overrides = [*overrides, f"launch.launcher={launcher}"]
    where = None if cluster is None else find_cluster(cluster)
    loaded = load_on(recipe, overrides, where)
    assignment = assignments.decide(loaded, run_dir, where)
    loaded = assignment.recipe
    chosen = LAUNCHERS[loaded.launch.launcher]()
    spec = chosen.spec(assignment.run_dir, loaded.cluster)
    spec = replace(spec, env={**spec.env, **environment(assignment.plan, loaded.cluster.gpu)})
    for reason in assignment.plan.reasons:
        _tell(reason)
    for line in summary(ledger_of(assignment.recipe, assignment.plan)):
        _tell(line)
    if dry_run:
        print(spec.printable())
        return
    prepare_ops(assignment.plan.engine, assignment.engine_config, _tell)
    run = assignments.write(assignment, ["dmt", *sys.argv[1:]])
    _tell(f"run directory {_short(run.path)}")
    before = events_offset(run.path)
    code = chosen.run(spec)
    if code in (EXIT_DONE, EXIT_RESUMABLE):
        _compare(run, before)
    if code == EXIT_DONE:
        _summary(run)
    raise typer.Exit(code)


def _compare(run: RunDirectory, offset: int) -> None:
    """The plan's prediction beside what this start measured."""
    for event in jsonl.read(run.events, offset):
        if event.get("kind") == "prediction":
            for quantity, text in told(event):
                _tell(f"{quantity:<12} {text}")


def _summary(run: RunDirectory) -> None:
    """Say where everything is."""
    shown = {
        "metrics": run.metrics,
        "events": run.events,
        "checkpoints": run.checkpoints,
        "export": run.export,
    }
    for name, path in shown.items():
        if path.exists():
            _tell(f"{name:<12} {_short(path)}")


def _short(path: Path) -> str:
    """The path relative to the working directory where that is shorter, for a shell."""
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path))


def _tell(message: str) -> None:
    print(redact(message), file=sys.stderr, flush=True)
