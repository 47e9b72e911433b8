"""`dmt doctor`: check this machine, measure its speed, or test its GPUs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.options import AsJson, Overrides, refuse_useless
from toolkit.cli.output import output
from toolkit.errors import EXIT_UNAVAILABLE
from toolkit.text.generated import check_out

ProcessesOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Processes that measure together; default: one per GPU, or 2 on a CPU."
    ),
]
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
    processes: ProcessesOption = None,
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
            "--processes": (processes, not checks, measures),
        }
    )
    if gpu_selftest:
        _self_test(out, processes, as_json)
    elif calibrate:
        _calibrate(processes, out or Path("cluster.yaml"), as_json)
    else:
        _check(recipe, overrides, as_json)


def _check(recipe: Path | None, overrides: list[str], as_json: bool) -> None:
    from toolkit.cli.doctor_table import lines
    from toolkit.doctor.examine import examine
    from toolkit.doctor.needs import Needs, needs_of
    from toolkit.intake.load import load_recipe

    needs = Needs() if recipe is None else needs_of(load_recipe(recipe, overrides))
    findings = [*examine(needs)] if as_json else []
    printed = lines(examine(needs), findings)
    output(as_json, {"findings": findings}, printed)
    if any(finding.blocks for finding in findings):
        raise typer.Exit(EXIT_UNAVAILABLE)


def _calibrate(processes: int | None, out: Path, as_json: bool) -> None:
    from toolkit.doctor import calibrate as calibration

    machine = calibration.this_machine(processes)
    calibration.check_known(machine)
    check_out(out, calibration.HEADER)
    speeds = calibration.calibrate(machine)
    calibration.write_cluster(out, calibration.cluster_text(machine, speeds))
    data = {"gpu": machine.gpu, "file": str(out), **asdict(speeds)}
    output(as_json, data, [f"wrote {out}; use it with --cluster {out}"], wrap=False)


def _self_test(out: Path | None, processes: int | None, as_json: bool) -> None:
    from toolkit.cli.selftest import run_self_test
    from toolkit.doctor.selftest import LIMIT_S, machine_suites
    from toolkit.rehearse.rehearsal import Options

    options = Options(limit_s=LIMIT_S)
    run_self_test(machine_suites, processes, out, options, as_json=as_json)
