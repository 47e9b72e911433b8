"""The report of a self-test, for a person or an issue: no secrets, no names of this machine."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit import __version__
from toolkit.doctor import accelerators, packages
from toolkit.doctor.needs import Needs
from toolkit.extras.doctor.selftest.check import Check, Workplace
from toolkit.extras.doctor.selftest.losses import BF16, FP8, UNMEASURED
from toolkit.extras.doctor.selftest.plan import CHECKS, MARK
from toolkit.extras.doctor.selftest.runs import LEAST_SHARE, SLOWEST
from toolkit.rehearse.comparison import TOLERANCE
from toolkit.run import jsonl
from toolkit.text.redact import redact

BOUNDS = f"""\
Losses and norms: relative differences from plain transformers, fp32, one process. Bounds: fp32
{TOLERANCE.loss:g} (other orders of summation); bf16: loss {BF16.loss:g}, norm
{BF16.grad_norm:g}; fp8: loss {FP8.loss:g}, norm {FP8.grad_norm:g} (five to ten times the
largest difference on a processor). On GPUs, bandwidth: {LEAST_SHARE:.0%} of the link's peak
(PCIe instead of NVLink has less); step time: {SLOWEST:g} times the plan's. What exceeds a bound
on a GPU is `measured`, and `failed` if losses or norms exceed it {UNMEASURED:g} times."""


def write(folder: Path, place: Workplace, checks: Sequence[Check], took_s: float) -> Path:
    """Write `report.md` into `folder`; its path."""
    file = folder / "report.md"
    text = "\n".join(_lines(place, checks, took_s))
    home = str(Path.home())
    file.write_text(redact(text if home == "/" else text.replace(home, "~")) + "\n", "utf-8")
    return file


def append(folder: Path, check: Check) -> None:
    """Add a check that has ended to `checks.jsonl`: what is killed later is not lost."""
    jsonl.append(folder / CHECKS, jsonl.plain(asdict(check), redact))


def machine_output(place: Workplace, checks: Sequence[Check]) -> dict[str, Any]:
    """What `--json` prints."""
    found: dict[str, Any] = jsonl.plain(
        {"machine": asdict(place.machine), "checks": [asdict(check) for check in checks]}
    )
    return found


def _lines(place: Workplace, checks: Sequence[Check], took_s: float) -> Iterator[str]:
    count = place.machine.processes
    yield f"{MARK}: {count} × {place.machine.device or place.machine.gpu}\n"
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    yield f"{when}, {took_s / 60:.1f} minutes, DMT {__version__}.\n"
    yield "| step | what | verdict | found | bound |"
    yield "|---|---|---|---|---|"
    for check in checks:
        cells = check.step, check.name, check.verdict, check.found, check.bound
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
    yield f"\n{BOUNDS}"
    for check in checks:
        if check.tail:
            title = f"{check.step} {check.name}: the end of {check.log}"
            yield f"\n## {title}\n\n~~~\n{check.tail}\n~~~"
    yield "\n## This machine\n"
    for finding in (*packages.check(Needs()), *accelerators.check(Needs())):
        yield f"- {finding.name}: {finding.found}"
