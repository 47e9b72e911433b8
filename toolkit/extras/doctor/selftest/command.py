"""`dmt doctor --selftest`, `--gpu-selftest`: progress output and table."""

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
from rich.text import Text

from toolkit.cli.bars import count_progress
from toolkit.cli.output import Hanging, output
from toolkit.doctor.calibrate import HEADER, check_known, this_machine
from toolkit.errors import EXIT_FAILED
from toolkit.extras.doctor.selftest import plan, report
from toolkit.extras.doctor.selftest.apart import in_processes
from toolkit.extras.doctor.selftest.check import Check, Workplace
from toolkit.text.generated import check_out
from toolkit.text.terminal import tell

_COLOURS = {"ok": "green", "measured": "cyan", "skipped": "dim", "failed": "bold red"}


def try_machine(
    folder: Path,
    processes: int | None,
    cluster: Path | None,
    *,
    gpu_only: bool,
    only: Sequence[str],
    jobs: int,
    as_json: bool,
) -> None:
    """Run the self-test, write its report, and exit with 4 when a part failed.

    `cluster`: the cluster file that is measured, written and used. `only`: titles of steps, or
    how they begin; none: all. `jobs`: how many that measure no speed run at once.
    """
    if cluster is not None:
        check_out(cluster, HEADER)
        check_known(this_machine(processes))
    place = plan.workplace(gpu_only, processes, folder)
    steps = plan.chosen(plan.steps(place, cluster), only)
    began = time.monotonic()
    checks = _run(steps, place, jobs)
    file = report.write(folder, place, checks, time.monotonic() - began)
    failed = any(check.verdict == "failed" for check in checks)
    if not failed:
        shutil.rmtree(place.folder)
    output(as_json, report.machine_output(place, checks), _lines(checks))
    tell(f"wrote {file}: attach it when you report a problem")
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _run(steps: Sequence[plan.Step], place: Workplace, jobs: int) -> list[Check]:
    """Every step; a line on standard error about each check, and a bar on a terminal."""
    checks = []
    apart = [step for step in steps if not step.measures] if jobs > 1 else []
    with count_progress(len(steps)) as update:

        def found() -> Iterator[Check]:
            for step, of_step in in_processes(apart, place, jobs):
                yield from of_step
                update(description=step.title, advance=1)
            for step in steps:
                if step not in apart:
                    update(description=step.title)
                    yield from plan.run([step], place)
                    update(advance=1)

        for check in found():
            checks.append(check)
            report.append(place.folder.parent, check)
            tell(f"{check.step}  {check.name}  {check.verdict}  {check.found}")
    return checks


def _lines(checks: Sequence[Check]) -> Iterator[Hanging]:
    """A line per check, and under one that failed its bound and its log."""
    wide = [max(len(getattr(check, key)) for check in checks) for key in ("step", "name")]
    for check in checks:
        head = f"{check.step:<{wide[0]}}  {check.name:<{wide[1]}}  "
        verdict = (f"{check.verdict:<8}  ", _COLOURS[check.verdict])
        yield Hanging(Text.assemble(head, verdict), check.found)
        if check.verdict == "failed":
            for what, value in (("bound", check.bound), ("log", check.log)):
                if value:
                    yield Hanging(Text(" " * 4), f"{what}: {value}")
