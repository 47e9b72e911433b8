"""DiLoCo's outer loop against synchronous data parallel: validation loss and bytes.

`recipes/tiny/llama-bytes.yaml`, 400 steps: synchronous runs, and four replicas that exchange
weights every 20 steps (`parallel.outer`), in fp32, with `compress: int8` and with `overlap:
delayed`. Each replica trains the recipe's batch of 16 per step, as the replicas of DiLoCo's
paper do: four times the samples of the recipe's synchronous run, in the same number of steps.
So there is a synchronous run with a batch of 64, too, which trains the same samples; and
replicas with a batch of 4, which train the same samples as the recipe's run. Every replica is
one process, all on this machine. Settings of the inner optimizer are the recipe's.

Bytes are those that the holder counted on its sockets, both directions, first weights included.
Replica 0 is at the holder's site; what the other three exchange with it crosses the links
between sites, three quarters of all. Synchronous data parallel over the same four sites has a
ring all-reduce of fp32 gradients in every step: each of R sites sends 2 (R-1)/R of 4 bytes per
parameter, 2 (R-1) * 4 * P in all.

    python benchmarks/outer.py FOLDER > benchmarks/results/outer-cpu-DATE.json
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RECIPE = "recipes/tiny/llama-bytes.yaml"
STEPS, REPLICAS, EVERY = 400, 4, 20
COMMON = (
    f"training.steps={STEPS}",
    "parallel.engine=ddp",
    "cluster.gpus_per_node=1",
    "training.micro_batch_size=4",
    "evaluation.every_steps=100",
    "checkpoint.every_steps=100",
    "checkpoint.export=false",
    "logging.every_steps=20",
    "logging.wandb=null",
)
OUTER: dict[str, Any] = {"replicas": REPLICAS, "every_steps": EVERY}
AVERAGE: dict[str, Any] = {**OUTER, "optimizer": "average"}
VALIDATION = 1024
"""Samples."""
RUNS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "synchronous": (16, None),
    "average": (64, AVERAGE),
    "nesterov": (64, OUTER),
    "average, int8": (64, {**AVERAGE, "compress": "int8"}),
    "average, delayed": (64, {**AVERAGE, "overlap": "delayed"}),
    "average, batch 16": (16, AVERAGE),
    "synchronous, batch 64": (64, None),
}


def launch(folder: Path, batch: int, outer: dict[str, Any] | None) -> None:
    """Train one of the runs, unless it is there."""
    settings = [
        *COMMON,
        f"training.global_batch_size={batch}",
        f"evaluation.batches={VALIDATION // batch}",
        *([f"parallel.outer={json.dumps(outer)}"] if outer else ()),
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "toolkit.cli.main", "launch", RECIPE, *words]
    subprocess.run([*command, "--run-dir", str(folder)], check=True, stdout=sys.stderr)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind."""
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def validation(folder: Path) -> dict[int, float]:
    """Validation loss by step."""
    return {event["step"]: event["loss"] for event in events(folder, "evaluation")}


def measured(folder: Path, outer: dict[str, Any] | None) -> dict[str, Any]:
    """Validation losses and bytes of a run."""
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    ring = 2 * (REPLICAS - 1) * 4 * plan["parameters"] * STEPS
    if outer is None:
        return {"validation": validation(folder), "bytes_of_ring_all_reduces": ring}
    replicas = [validation(folder / "replicas" / str(n)) for n in range(REPLICAS)]
    last = [event for event in events(folder, "outer") if "sent" in event][-1]
    count = last["sent"] + last["received"]
    return {
        "settings": outer,
        "validation": replicas[0],
        "last_validation_of_replicas": [one[STEPS] for one in replicas],
        "socket_bytes": count,
        "bytes_between_sites": count * (REPLICAS - 1) // REPLICAS,
        "of_ring_all_reduces_between_sites": count * (REPLICAS - 1) / REPLICAS / ring,
    }


def main() -> None:
    """Train all runs, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for the runs")
    folder = parser.parse_args().folder
    found = {}
    for name, (batch, outer) in RUNS.items():
        place = folder / name.replace(", ", "-").replace(" ", "-")
        launch(place, batch, outer)
        found[name] = {"batch": batch, **measured(place, outer)}
    plain = found["synchronous"]["validation"][STEPS]
    for name, one in found.items():
        one["validation_over_synchronous"] = one["validation"][STEPS] / plain
        print(name, one, file=sys.stderr)
    print(json.dumps({"recipe": RECIPE, "common": COMMON, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
