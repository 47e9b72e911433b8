"""`dmt rehearse --on gpu`, `dmt doctor --gpu-selftest`: progress, table and report."""

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from toolkit.cli.output import Table, output
from toolkit.doctor.selftest import MARK, Check, Suite, gpu_machine, report, self_test
from toolkit.errors import EXIT_FAILED
from toolkit.rehearse.rehearsal import Options
from toolkit.text.generated import check_out
from toolkit.text.terminal import tell

_COLOURS = {"ok": "green", "skipped": "dim", "failed": "bold red"}
_TABLE = Table[Check](
    {
        "step": lambda one: one.step,
        "what": lambda one: one.name,
        "verdict": lambda one: one.verdict,
        "found": lambda one: one.found,
    },
    left=4,
    remark=lambda one: f"bound: {one.bound}" if one.verdict == "failed" and one.bound else "",
)


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
    output(as_json, data, _TABLE.lines(checks, lambda one: _COLOURS[one.verdict]))
    tell(f"wrote {out}: attach it when you report a problem")
    if failed:
        raise typer.Exit(EXIT_FAILED)
