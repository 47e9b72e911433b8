"""The parts of the self-test that measure, and those that are whole runs of `dmt launch`."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from toolkit.doctor import calibrate
from toolkit.doctor.speeds import Speeds
from toolkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR
from toolkit.extras.doctor.bandwidth import Bandwidth
from toolkit.extras.doctor.selftest.check import (
    LIMIT_S,
    Check,
    CheckVerdict,
    LoggedFailure,
    Workplace,
)
from toolkit.extras.doctor.selftest.losses import UNMEASURED
from toolkit.launchers.process import die_with_parent
from toolkit.rehearse.comparison import TOLERANCE, relative_difference
from toolkit.rehearse.ranks import launch_spec, run_ranks
from toolkit.run import jsonl
from toolkit.run.comparison import differences
from toolkit.run.directory import RunDirectory
from toolkit.system.failpoints import VARIABLE
from toolkit.system.interpreter import python
from toolkit.text.redact import redact

STEPS, SAVED, KILLED = 12, 5, 9
"""Of the run that is killed: its steps, after which step it saves, and in which one a rank is
killed. Too few steps follow the checkpoint for the resumed run to be killed again."""
LEAST_SHARE = 0.25
"""Of NVLink's peak: PCIe 5.0, over which NCCL goes without NVLink, has 14% of an H100's."""
SLOWEST = 2.0
"""Times the plan's step: all but one of the published runs that the planner is graded on are
within it (`benchmarks/calibrate_planner.py`)."""
_TAIL_LINES = 20
QUIET = (
    "logging.wandb=null", "logging.every_steps=1", "evaluation.every_steps=null",
    "evaluation.batches=1", "checkpoint.export=false", "schedule.warmup_steps=0",
)  # fmt: skip


def measured_by_ranks(place: Workplace, name: str, module: str) -> Any:
    """What rank 0 of `python -m MODULE RESULT.json` wrote. Raises LoggedFailure."""
    folder = place.folder / name
    result = folder / "result.json"
    machine = place.machine
    spec = launch_spec(folder, machine.processes, ["-m", module, str(result)], machine.gpu)
    failure = run_ranks(spec, LIMIT_S)
    if failure is not None:
        raise LoggedFailure(failure.why, folder / "logs", failure.log)
    return json.loads(result.read_text("utf-8"))


def calibration(place: Workplace, out: Path) -> Iterator[Check]:
    """Measure this machine and write its cluster file."""
    speeds = Speeds(**measured_by_ranks(place, "calibrate", "toolkit.doctor.speeds"))
    calibrate.write_cluster(out, calibrate.cluster_text(place.machine, speeds))
    flops = ", ".join(f"{key} {n / 1e12:.3g} TFLOP/s" for key, n in speeds.matmul_flops.items())
    text = f"{flops}, memory {speeds.memory_bytes_per_s / 1e9:.3g} GB/s; wrote {out.name}"
    yield Check("calibrate", place.machine.gpu, "measured", text, numbers=asdict(speeds))


def bandwidth(place: Workplace) -> Iterator[Check]:
    """Collectives between the ranks, each at its largest size."""
    if place.machine.processes == 1:
        yield Check("bandwidth", "", "skipped", "one process has no peer")
        return
    found = measured_by_ranks(place, "bandwidth", "toolkit.extras.doctor.bandwidth")
    rates = TypeAdapter(Bandwidth).validate_python(found).rates
    for rate in {one.operation: one for one in rates}.values():  # the last is the largest
        peak, bus = rate.peak_bytes_per_s, rate.bus_bytes_per_s
        text = f"{rate.message_bytes / 2**20:.4g} MiB: bus {bus / 1e9:.3g} GB/s"
        verdict: CheckVerdict = "measured"
        bound = ""
        if peak is not None:
            nominal = "" if place.on_gpu else ", which is nominal"
            text += f", {bus / peak:.0%} of {peak / 1e9:.3g}{nominal}"
        if peak is not None and place.on_gpu:
            bound = f"{LEAST_SHARE:.0%} of the peak"
            verdict = "ok" if bus >= LEAST_SHARE * peak else "measured"
        yield Check("bandwidth", rate.operation, verdict, text, bound, numbers=asdict(rate))


def resume(place: Workplace, recipe: Path) -> Iterator[Check]:
    """Kill a rank of a run, start the run again, and compare the steps that are done twice."""
    ranks = place.machine.processes
    settings = [
        *QUIET, f"training.steps={STEPS}", f"training.global_batch_size={4 * ranks}",
        f"checkpoint.every_steps={SAVED}", "checkpoint.asynchronous=false",
    ]  # fmt: skip
    folder = place.folder / "resume"
    kill = {VARIABLE: f"step=kill@rank{ranks - 1},hit{KILLED}"}
    code = _launch(place, folder, recipe, settings, kill)
    before = _losses(folder)
    last = max(before, default=0)
    if code != EXIT_FAILED or last <= SAVED:
        raise _failed(folder, f"the killed run ended with {code} after step {last}")
    if code := _launch(place, folder, recipe, settings):
        raise _failed(folder, f"the resumed run ended with {code}")
    events = jsonl.read(RunDirectory(folder / "run").events)
    resumed = [event["step"] for event in events if event["kind"] == "resume"]
    after = _losses(folder)
    twice = {step: loss for step, loss in before.items() if step > SAVED}
    far = max(relative_difference(after[step], loss) for step, loss in twice.items())
    limit = TOLERANCE.loss
    whole = resumed == [SAVED] and max(after) == STEPS
    verdict: CheckVerdict = "ok" if whole and far <= limit else "failed"
    if whole and far > limit and place.on_gpu and far <= UNMEASURED * limit:
        verdict = "measured"
    steps = ", ".join(map(str, twice))
    yield Check(
        "resume",
        f"rank {ranks - 1} killed",
        verdict,
        f"resumed from step {resumed}, repeated {steps}: loss {far:.0e}, then to {max(after)}",
        f"from {SAVED}, loss {limit:g}, to {STEPS}",
        numbers={"max_rel_loss": far, "resumed_from": resumed, "repeated": list(twice)},
    )


def speed(
    place: Workplace, engine: str, recipe: Path, settings: Sequence[str], cluster: Path | None
) -> Iterator[Check]:
    """The step time, MFU and memory of a run, next to those of its plan."""
    folder = place.folder / f"speed-{engine}"
    how = "checkpoint.every_steps=null", f"parallel.engine={engine}"
    code = _launch(place, folder, recipe, [*settings, *QUIET, *how], cluster=cluster)
    name = recipe.stem
    if code == EXIT_USER_ERROR:  # no layout of it fits
        yield Check(f"speed {engine}", name, "skipped", _error(folder))
        return
    if code != EXIT_DONE:
        raise _failed(folder, f"the run ended with {code}")
    run = RunDirectory(folder / "run")
    events = jsonl.read(run.events)
    event = next(one for one in events if one["kind"] == "prediction")
    lines = jsonl.read(run.metrics)
    mfus = sorted(line["mfu"] for line in lines[2:] if line["mfu"] is not None)
    mfu = mfus[len(mfus) // 2] if mfus else None
    slower = event["measured_over_predicted"]["step_time"]
    text = "; ".join(f"{what} {value}" for what, value in differences(event))
    text += "" if mfu is None else f"; MFU {mfu:.1%}"
    verdict: CheckVerdict = "measured"
    bound = ""
    if place.on_gpu and slower is not None:
        bound = f"{SLOWEST:g} × the plan's step"
        verdict = "ok" if slower <= SLOWEST else "measured"
    numbers = {**event, "mfu": mfu}
    yield Check(f"speed {engine}", name, verdict, text, bound, numbers=numbers)


def _launch(
    place: Workplace,
    folder: Path,
    recipe: Path,
    settings: Sequence[str],
    environment: Mapping[str, str] = {},
    cluster: Path | None = None,
) -> int:
    """`dmt launch` of a recipe on this machine, its output in a file; its exit code."""
    machine = place.machine
    here = [f"cluster.gpus_per_node={machine.processes}", f"cluster.gpu={machine.gpu}"]
    on = ["--cluster", str(cluster)] if cluster else []
    settings = [*settings, "cluster.nodes=1", *([] if cluster else here)]
    command = [*python(), "-m", "toolkit.cli.main", "launch", str(recipe), *on]
    command += ["--run-dir", str(folder / "run"), *(f"--set={text}" for text in settings)]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("ab") as log:
        try:
            return subprocess.run(
                command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, timeout=LIMIT_S, check=False,
                preexec_fn=die_with_parent(signal.SIGTERM),
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise _failed(folder, f"no end after {LIMIT_S:g} s") from error


def _losses(folder: Path) -> dict[int, float]:
    """Step → loss of the run's logged steps."""
    lines = jsonl.read(RunDirectory(folder / "run").metrics)
    return {line["step"]: float(line["loss"]) for line in lines}


def _failed(folder: Path, what: str) -> LoggedFailure:
    tail = "\n".join(_log(folder)[-_TAIL_LINES:])
    return LoggedFailure(f"{what}: {_error(folder)}", folder / "log", tail)


def _error(folder: Path) -> str:
    """The first line of a log that says what was wrong; its last one where none does."""
    lines = _log(folder)
    errors = [line for line in lines if line.lower().startswith(("error", "dmt:"))]
    return (errors or lines[-1:] or ["no output"])[0]


def _log(folder: Path) -> list[str]:
    text = redact((folder / "log").read_text("utf-8", errors="replace"))
    return [line for line in text.splitlines() if line.strip()]
