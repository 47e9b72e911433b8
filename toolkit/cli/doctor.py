"""`dmt doctor`: check this machine, or measure its speed."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.extras import option
from toolkit.cli.options import AsJson, Overrides
from toolkit.cli.output import output
from toolkit.errors import EXIT_UNAVAILABLE, PlanError
from toolkit.text.generated import check_out

BandwidthOption = Annotated[
    bool,
    typer.Option(
        "--bandwidth",
        help="Measure collectives between processes instead, against the link's peak. "
        "Under torchrun, between all of its ranks.",
    ),
]
ProcessesOption = Annotated[
    int | None,
    typer.Option(help="Processes that measure together; default: one per GPU, or 2 on a CPU."),
]

CalibrateOption = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="Measure matrix products, memory and collectives instead, in under a minute.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(help="Cluster file that --calibrate writes; default: cluster.yaml."),
]
SelfTestOption = Annotated[
    bool,
    typer.Option(
        "--selftest",
        help="Try instead what training needs, on the GPUs or, without any, the processor: "
        "every engine against plain transformers, a resume, bandwidth, speed. Minutes.",
    ),
]
GpuSelfTestOption = Annotated[
    bool, typer.Option("--gpu-selftest", help="The same, but exit 3 where there is no GPU.")
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STEP",
        help="Run only this step of --selftest, or those that begin so, e.g. losses; "
        "repeatable.",
    ),
]
JobsOption = Annotated[
    int,
    typer.Option(
        min=1, help="Steps of --selftest that run at once; speeds are measured alone."
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(help="Where --selftest works and writes report.md; default: dmt-selftest."),
]


def doctor(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE",
            help="Recipe YAML: exit 3 when something that it needs is missing here.",
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    hostfile: Annotated[
        Path | None,
        typer.Option(
            help="Also ask these machines whether they answer: one HOST slots=N a line."
        ),
    ] = None,
    bandwidth: BandwidthOption = False,
    calibrate: CalibrateOption = False,
    out: OutOption = None,
    selftest: SelfTestOption = False,
    gpu_selftest: GpuSelfTestOption = False,
    folder: FolderOption = None,
    only: OnlyOption = None,
    jobs: JobsOption = 1,
    processes: ProcessesOption = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine, measure its speed, or test it. Without a recipe, exit 3 only without
    torch; exit 4 when a part of the self-test fails.

    Example: `dmt doctor recipes/tiny/llama-bytes.yaml`, or
    `dmt doctor --calibrate --out cluster.yaml`, then `dmt plan RECIPE --cluster cluster.yaml`
    """
    file, testing = out or Path("cluster.yaml"), selftest or gpu_selftest
    here = calibrate or testing
    _refuse_useless(
        {
            "RECIPE": (recipe, not (bandwidth or here)),
            "--set": (overrides, recipe is not None),
            "--hostfile": (hostfile, not (bandwidth or here)),
            "--bandwidth": (bandwidth, not here),
            "--out": (out, calibrate),
            "--folder": (folder, testing),
            "--only, --jobs": (only or jobs > 1, testing),
            "--processes": (processes, here or (bandwidth and "RANK" not in os.environ)),
        }
    )
    if testing:
        place = folder or Path("dmt-selftest"), processes, file if calibrate else None
        option("doctor --selftest")(
            *place, gpu_only=gpu_selftest, only=only or (), jobs=jobs, as_json=as_json
        )
    elif bandwidth:
        option("doctor --bandwidth")(processes, as_json)
    elif calibrate:
        _calibrate(processes, file, as_json)
    else:
        _check(recipe, overrides, hostfile, as_json)


def _refuse_useless(stated: Mapping[str, tuple[object, bool]]) -> None:
    """Each option's value, and whether the others allow it: no option is ignored."""
    useless = [name for name, (value, meant) in stated.items() if value and not meant]
    if useless:
        raise PlanError(
            f"dmt doctor: {', '.join(useless)} would be ignored here",
            fix="leave it out: a check reads RECIPE, --set and --hostfile; --bandwidth reads "
            "--processes, but not under a launcher; --calibrate reads --processes and --out; "
            "--selftest reads --processes, --folder, --calibrate, --only and --jobs",
        )


def _check(
    recipe: Path | None, overrides: list[str], hostfile: Path | None, as_json: bool
) -> None:
    from toolkit.cli.doctor_table import lines
    from toolkit.doctor.examine import examine
    from toolkit.doctor.needs import Needs, needs_of
    from toolkit.doctor.network import read_hostfile
    from toolkit.intake.load import load_recipe

    needs = Needs() if recipe is None else needs_of(load_recipe(recipe, overrides))
    if hostfile is not None:
        read_hostfile(hostfile)  # a mistake in it is reported before a second is spent
    findings = [*examine(needs, hostfile)] if as_json else []
    printed = lines(examine(needs, hostfile), findings)
    output(as_json, {"findings": findings}, printed)
    if any(finding.blocks for finding in findings):
        raise typer.Exit(EXIT_UNAVAILABLE)


def _calibrate(processes: int | None, out: Path, as_json: bool) -> None:
    from toolkit.doctor import calibrate as calibration

    machine = calibration.this_machine(processes)
    calibration.check_known(machine)
    check_out(out, calibration.HEADER)
    calibration.tell_count(machine)
    speeds = calibration.calibrate(machine)
    calibration.write_cluster(out, calibration.cluster_text(machine, speeds))
    data = {"gpu": machine.gpu, "file": str(out), **asdict(speeds)}
    output(as_json, data, [f"wrote {out}; use it with --cluster {out}"], wrap=False)
