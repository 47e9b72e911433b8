"""Two data-parallel ranks, one of which gets half the processor time of the other: the step
time with equal micro batches and with `parallel.balance: auto`, against the ideal.

    sudo python benchmarks/uneven.py [--engine ddp] [--out benchmarks/results/…json]

Each rank is in a control group of its own (Linux, cgroup v1, as root) with a quota of processor
time, and a weight that keeps other programs of the machine from it. The ideal is that of speeds
1 and 1/2: the step of two fast ranks times 2 / 1.5. A pipeline of such ranks is measured by
`uneven_pipeline.py`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RECIPE = "recipes/tiny/llama-bytes.yaml"
GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US, FAST, SLOW = 10_000, 0.6, 0.3
"""Of a scheduler's period; parts of a core."""
WEIGHT = 2**18
TOLERANCE, WITHIN = 1e-5, 0.10
SETTINGS: dict[str, Any] = {
    "cluster.gpus_per_node": 2,
    "training.precision": "fp32",
    "training.global_batch_size": 96,
    "training.micro_batch_size": 12,
    "schedule.warmup_steps": 0,
    "checkpoint.every_steps": 3,
    "checkpoint.keep": 1,
    "checkpoint.export": "false",
    "evaluation.every_steps": "null",
    "logging.every_steps": 1,
}
THROTTLE = """
import os
group = os.environ.get("THROTTLED")
if group and "RANK" in os.environ:
    from pathlib import Path
    own = Path(f"{group}-{os.environ['RANK']}")
    (own / "cgroup.procs").write_text(str(os.getpid()))
    from toolkit.train import loop
    train = loop.train
    def throttled(*given, **named):
        quotas = os.environ["QUOTAS_US"].split(",")
        (own / "cpu.cfs_quota_us").write_text(quotas[int(os.environ["RANK"])])
        return train(*given, **named)
    loop.train = throttled
"""


def make_groups() -> list[Path]:
    """A control group for each rank, without a quota yet."""
    found = [Path(f"{GROUPS}/dmt-uneven-{rank}") for rank in (0, 1)]
    for group in found:
        group.mkdir(exist_ok=True)
        (group / "cpu.cfs_quota_us").write_text("-1")
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.shares").write_text(str(WEIGHT))
    return found


def run(folder: Path, name: str, settings: dict[str, Any], quotas: list[float]) -> Path:
    """Train with ranks that get so much of a core; returns the run directory."""
    groups = make_groups()
    stated = SETTINGS | settings
    words = [word for key, value in stated.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "toolkit.cli.main", "launch", RECIPE, *words]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}:{Path.cwd()}",
        "QUOTAS_US": ",".join(str(round(PERIOD_US * part)) for part in quotas),
        "THROTTLED": str(groups[0]).removesuffix("-0"),
    }
    try:
        done = subprocess.run(
            [*command, "--run-dir", str(folder / name)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        for group in groups:
            group.rmdir()
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return folder / name


def lines(path: Path) -> list[dict[str, Any]]:
    """Of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def median_step_s(metrics: list[dict[str, Any]], first: int) -> float:
    """Of the steps behind `first`."""
    return statistics.median(one["step_time_s"] for one in metrics if one["step"] > first)


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All runs of an engine, compared."""
    settings = {
        "parallel.engine": options.engine,
        "parallel.zero.stage": options.zero,
        "training.steps": options.steps,
    }
    balanced = settings | {"parallel.balance": "auto"}
    runs = {
        "fast": run(folder, "fast", settings, [FAST, FAST]),
        "even": run(folder, "even", settings, [FAST, SLOW]),
        "balanced": run(folder, "balanced", balanced, [FAST, SLOW]),
    }
    metrics = {name: lines(one / "metrics.jsonl") for name, one in runs.items()}
    moves = [
        one for one in lines(runs["balanced"] / "events.jsonl") if one["kind"] == "balance"
    ]
    moved = moves[-1]["from_step"] + 1 if moves else options.steps // 2
    step_s = {name: median_step_s(found, moved) for name, found in metrics.items()}
    ideal_s = step_s["fast"] * 2 / (1 + SLOW / FAST)
    pairs = zip(metrics["even"], metrics["balanced"], strict=True)
    return {
        "engine": options.engine,
        "zero_stage": options.zero,
        "speeds": [1, SLOW / FAST],
        "moves": [{key: one[key] for key in ("step", "shares", "speeds")} for one in moves],
        "ideal_step_s": round(ideal_s, 4),
        "step_s": {name: round(one, 4) for name, one in step_s.items()},
        "over_ideal": {
            name: round(step_s[name] / ideal_s - 1, 3) for name in ("even", "balanced")
        },
        "largest_loss_difference": max(abs(a["loss"] / b["loss"] - 1) for a, b in pairs),
        "steps": options.steps,
        "date": datetime.now(UTC).date().isoformat(),
        "cpus": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--engine", default="ddp")
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not (GROUPS / "cpu.shares").exists() or os.geteuid():
        sys.exit(f"needs root and cgroup v1 at {GROUPS}")
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "sitecustomize.py").write_text(THROTTLE)
        result = measured(Path(name), options)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(f"{text}\n", encoding="utf-8")
    if result["largest_loss_difference"] > TOLERANCE:
        sys.exit("the losses differ")
    if result["over_ideal"]["balanced"] > WITHIN:
        sys.exit("the step is not within 10% of the ideal")


if __name__ == "__main__":
    main()
