"""`dmt rehearse --on gpu`, `dmt doctor --gpu-selftest`: progress, table and report."""

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import typer
from rich.text import Text

from toolkit.cli.output import Hanging, output
from toolkit.doctor.selftest import Check, SelfTest, write_report
from toolkit.errors import EXIT_FAILED
from toolkit.text.terminal import tell

_COLOURS = {"ok": "green", "skipped": "dim", "failed": "bold red"}


def run_self_test(test: SelfTest, *, as_json: bool) -> None:
    """Run it, with a line about each check and a report that is written after each.

    Exits with 4 when a part failed; only then its runs are kept.
    """
    began, checks = time.monotonic(), list[Check]()
    for check in test.checks():
        checks.append(check)
        tell(f"{check.step}  {check.name}  {check.verdict}  {check.found}")
        file = write_report(test.folder, test.machine, checks, time.monotonic() - began)
    failed = any(check.verdict == "failed" for check in checks)
    if not failed:
        shutil.rmtree(test.folder / "runs")
    data = {"machine": asdict(test.machine), "checks": [asdict(check) for check in checks]}
    output(as_json, data, _lines(checks))
    tell(f"wrote {file}: attach it when you report a problem")
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _lines(checks: Sequence[Check]) -> Iterator[Hanging]:
    """A line per check, and under one that failed its bound."""
    wide = [max(len(getattr(check, key)) for check in checks) for key in ("step", "name")]
    for check in checks:
        head = f"{check.step:<{wide[0]}}  {check.name:<{wide[1]}}  "
        verdict = (f"{check.verdict:<8}  ", _COLOURS[check.verdict])
        yield Hanging(Text.assemble(head, verdict), check.found)
        if check.verdict == "failed" and check.bound:
            yield Hanging(Text(" " * 4), f"bound: {check.bound}")
