"""`dmt doctor`: what this machine can do."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from toolkit.errors import PlanError


def doctor(
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure matrix products, memory and collectives, under a minute.",
        ),
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", help="Cluster file that --calibrate writes.")
    ] = Path("cluster.yaml"),
    processes: Annotated[
        int | None,
        typer.Option(
            help="Processes that measure together; default: one per GPU, or 2 on a CPU."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print machine output alone on standard output.")
    ] = False,
) -> None:
    """Measure this machine, for plans whose step times are its own.

    Example: `dmt doctor --calibrate --processes 2 --out cluster.yaml`, then
    `dmt plan RECIPE --cluster cluster.yaml`
    """
    if not calibrate:
        raise PlanError(
            "dmt doctor: says what to do; it can measure this machine's speeds",
            fix="`dmt doctor --calibrate --out cluster.yaml`",
        )
    from toolkit.doctor import calibrate as calibration

    machine = calibration.this_machine(processes)
    calibration.check_out(out)
    count = f"{machine.processes} process{'es' * (machine.processes > 1)}"
    print(f"measuring {machine.gpu} with {count}", file=sys.stderr)
    speeds = calibration.calibrate(machine)
    calibration.write_cluster(out, calibration.cluster_text(machine, speeds))
    if as_json:
        typer.echo(json.dumps({"gpu": machine.gpu, "file": str(out), **asdict(speeds)}))
    else:
        typer.echo(f"wrote {out}; use it with --cluster {out}")
