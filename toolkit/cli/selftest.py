"""`dmt rehearse --on gpu`, `dmt doctor --gpu-selftest`: progress, table and report."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import typer
from rich.text import Text

from toolkit.cli.output import Line, output
from toolkit.doctor.selftest import MARK, Check, Suite, gpu_machine, report, self_test
from toolkit.errors import EXIT_FAILED
from toolkit.rehearse.rehearsal import Options
from toolkit.text.generated import check_out
from toolkit.text.terminal import tell

_COLOURS = {"ok": "green", "skipped": "dim", "failed": "bold red"}


def run_self_test(
    suites_of: Callable[[int], Sequence[Suite]],
    out: Path | None,
    options: Options,
    *,
    as_json: bool,
) -> None:
    """Run the self-test. Print a line about each check and write the report after each.

    `suites_of` gives the suites for a number of GPUs. If a part failed, exits with 4 and keeps
    its runs.
    """
    machine, out = gpu_machine(), out or Path("dmt-selftest.md")
    check_out(out, MARK)
    folder = Path(tempfile.mkdtemp(prefix="dmt-selftest-"))
    began, checks = time.monotonic(), list[Check]()
    for check in self_test(suites_of(machine.processes), machine, folder, options):
        checks.append(check)
        tell(f"{check.step}  {check.name}  {check.verdict}  {check.found}")
        out.write_text(report(machine, checks, time.monotonic() - began), encoding="utf-8")
    failed = any(check.verdict == "failed" for check in checks)
    if failed:
        tell(f"the runs are in {folder}")
    else:
        shutil.rmtree(folder)
    data = {"machine": asdict(machine), "checks": [asdict(check) for check in checks]}
    output(as_json, data, _lines(checks))
    tell(f"wrote {out}: attach it when you report a problem")
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _lines(checks: Sequence[Check]) -> Iterator[Line]:
    """One line per check. Below a failed check, its bound."""
    wide = [max(len(getattr(check, key)) for check in checks) for key in ("step", "name")]
    for check in checks:
        head = f"{check.step:<{wide[0]}}  {check.name:<{wide[1]}}  "
        verdict = (f"{check.verdict:<8}  ", _COLOURS[check.verdict])
        yield Text.assemble(head, verdict, check.found)
        if check.verdict == "failed" and check.bound:
            yield f"    bound: {check.bound}"
