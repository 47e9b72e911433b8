"""`dmt doctor`: check this machine, measure its speed, or test its GPUs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from toolkit.cli.options import AsJson, Overrides, refuse_useless
from toolkit.cli.output import Line, output
from toolkit.doctor.finding import Finding, Level
from toolkit.errors import EXIT_UNAVAILABLE
from toolkit.text.generated import check_out

CalibrateOption = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="Measure speeds for the planner instead, in under a minute.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Cluster file that --calibrate writes (default: cluster.yaml), or the self-test's "
        "report (default: dmt-selftest.md).",
    ),
]
GpuSelfTestOption = Annotated[
    bool,
    typer.Option(
        "--gpu-selftest",
        help="Train tiny models on the GPUs instead, in every engine, next to plain "
        "transformers. Then kill and resume a run.",
    ),
]


def doctor(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE",
            help="Exit 3 when something that this recipe needs is missing here.",
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    calibrate: CalibrateOption = False,
    out: OutOption = None,
    gpu_selftest: GpuSelfTestOption = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine, measure its speed, or test its GPUs.

    Example: `dmt doctor llama-bytes`

    Example: `dmt doctor --calibrate`, then `dmt plan RECIPE --cluster cluster.yaml`
    """
    checks = not (calibrate or gpu_selftest)
    measures = "with --calibrate or --gpu-selftest"
    refuse_useless(
        {
            "RECIPE": (recipe, checks, f"not {measures}"),
            "--set": (overrides, recipe is not None, "with RECIPE"),
            "--gpu-selftest": (gpu_selftest, not calibrate, "without --calibrate"),
            "--out": (out, not checks, measures),
        }
    )
    if gpu_selftest:
        _self_test(out, as_json)
    elif calibrate:
        _calibrate(out or Path("cluster.yaml"), as_json)
    else:
        _check(recipe, overrides, as_json)


def _check(recipe: Path | None, overrides: list[str], as_json: bool) -> None:
    from toolkit.doctor.examine import examine
    from toolkit.doctor.needs import Needs, needs_of
    from toolkit.intake.load import load_recipe

    needs = Needs() if recipe is None else needs_of(load_recipe(recipe, overrides))
    findings = [*examine(needs)]
    output(as_json, {"findings": findings}, _findings(findings))
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(EXIT_UNAVAILABLE)


def _calibrate(out: Path, as_json: bool) -> None:
    from toolkit.doctor import calibrate as calibration

    machine = calibration.this_machine()
    calibration.check_known(machine)
    check_out(out, calibration.HEADER)
    speeds = calibration.calibrate(machine)
    out.write_text(calibration.cluster_text(machine, speeds), encoding="utf-8")
    data = {"gpu": machine.gpu, "file": str(out), **asdict(speeds)}
    output(as_json, data, [f"wrote {out}; use it with --cluster {out}"], wrap=False)


def _self_test(out: Path | None, as_json: bool) -> None:
    from toolkit.cli.selftest import run_self_test
    from toolkit.doctor.selftest import LIMIT_S, machine_suites
    from toolkit.rehearse.rehearsal import Options

    options = Options(limit_s=LIMIT_S)
    run_self_test(machine_suites, out, options, as_json=as_json)


_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "problem": ("✗", "red"),
}
_NAME_WIDTH = 13
"""Width of the names' column. A longer name moves its own line only."""


def _findings(findings: Sequence[Finding]) -> Iterator[Line]:
    """Lines about findings. Those of a group that are fine share one line. Each other one adds
    its cost, what needs it and its fix. The last line counts all."""
    for group in dict.fromkeys(finding.group for finding in findings):
        members = [finding for finding in findings if finding.group == group]
        if fine := [f"{one.name} {one.found}" for one in members if one.level == "ok"]:
            yield _line("ok", group, ", ".join(fine))
        for finding in (one for one in members if one.level != "ok"):
            yield _line(finding.level, finding.name, finding.found)
            about = {"costs": finding.cost, "needed by": finding.needed_by, "fix": finding.fix}
            for word, value in about.items():
                if value:
                    yield f"    {word}: {value}"
    levels = [finding.level for finding in findings]
    counts = {level: levels.count(level) for level in ("problem", "warning")}
    yield ", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items())


def _line(level: Level, name: str, found: str) -> Text:
    mark, colour = _MARKS[level]
    return Text.assemble((mark, colour), f" {name:<{_NAME_WIDTH}}  {found}")
