"""`dmt doctor --selftest`, `--gpu-selftest`: progress output and table."""

import json
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from toolkit.cli.bars import print_hanging
from toolkit.cli.console import Console
from toolkit.doctor.calibrate import check_out
from toolkit.doctor.selftest import plan, report
from toolkit.doctor.selftest.check import Check, Workplace
from toolkit.errors import EXIT_FAILED
from toolkit.handlers import handling
from toolkit.terminal import tell

_COLOURS = {"ok": "green", "measured": "cyan", "skipped": "dim", "failed": "bold red"}


def try_machine(
    folder: Path, processes: int | None, cluster: Path | None, gpu_only: bool, as_json: bool
) -> None:
    """Run the self-test, write its report, and exit with 4 when a part failed.

    `cluster`: the cluster file that is measured, written and used.
    """
    if cluster is not None:
        check_out(cluster)
    place = plan.workplace(gpu_only, processes, folder)
    began = time.monotonic()
    checks = _run(plan.steps(place, cluster), place)
    file = report.write(folder, place, checks, time.monotonic() - began)
    failed = any(check.verdict == "failed" for check in checks)
    if not failed:
        shutil.rmtree(place.folder)
    if as_json:
        typer.echo(json.dumps(report.machine_output(place, checks)))
    else:
        _show(checks, Console())
    tell(f"wrote {file}: attach it when you report a problem")
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _run(steps: Sequence[plan.Step], place: Workplace) -> list[Check]:
    """Every step; a line on standard error about each check, and a bar on a terminal."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    checks = []
    # SIGTERM cleans up as Ctrl-C does.
    with handling([signal.SIGTERM], signal.default_int_handler), bar:
        task = bar.add_task("", total=len(steps))
        for step in steps:
            bar.update(task, description=step.title)
            for check in plan.run([step], place):
                checks.append(check)
                tell(f"{check.step}  {check.name}  {check.verdict}  {check.found}")
            bar.advance(task)
    return checks


def _show(checks: Sequence[Check], console: Console) -> None:
    """A line per check, and under one that failed its bound and its log."""
    wide = [max(len(getattr(check, key)) for check in checks) for key in ("step", "name")]
    for check in checks:
        head = f"{check.step:<{wide[0]}}  {check.name:<{wide[1]}}  "
        verdict = (f"{check.verdict:<8}  ", _COLOURS[check.verdict])
        print_hanging(console, Text.assemble(head, verdict), check.found)
        if check.verdict == "failed":
            for what, value in (("bound", check.bound), ("log", check.log)):
                if value:
                    print_hanging(console, Text(" " * 4), f"{what}: {value}")
