"""What checkpoints cost: the stall of a save while training, and GB/s against a plain copy.

    python benchmarks/checkpointing.py [--rounds 3] [--folder DISK] [--out benchmarks/results/…]

Stall: the tiny recipe saves every 50 steps. Per interval, the seconds from one step's end to
the next one's are added up; what an interval with a save takes longer than fifty median steps
is its cost, next to the stall that the run itself reports in its `save` events.

Speed: a model of about 80 million parameters (1 GB of fp32 weights and moments) is trained for
one step, saved synchronously and asynchronously, verified and loaded by the product's own
engine, `Saver` and resume. The same files are then copied by `dd` and synced.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

TINY = Path("recipes/tiny/llama-bytes.yaml")
INTERVAL_STEPS = 50
TINY_STEPS = 310
LARGE = """
name: checkpointing
model:
  config:
    model_type: llama
    vocab_size: 32000
    hidden_size: 768
    intermediate_size: 2048
    num_hidden_layers: 8
    num_attention_heads: 12
    num_key_value_heads: 12
    max_position_embeddings: 256
    tie_word_embeddings: true
data:
  train: {kind: text, files: [unread.txt]}
  tokenizer: bytes
training: {steps: 1, sequence_length: 16, global_batch_size: 2, precision: fp32, seed: 1}
optimizer: {learning_rate: 1.0e-3}
cluster: {nodes: 1, gpus_per_node: 1, gpu: cpu}
"""
LAYOUTS = {
    "ddp x1": (1, ["parallel.engine=ddp"]),
    "zero2 x2": (
        2,
        ["parallel.engine=deepspeed", "parallel.zero.stage=2", "cluster.gpus_per_node=2"],
    ),
}
GB = 1e9


def launch(world: int, worker: str, *arguments: str | Path) -> None:
    """Run this file's worker on `world` ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world}", __file__, "--worker", worker]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    ended = subprocess.run(
        [*command, *map(str, arguments)], env=environment, capture_output=True, text=True
    )
    if ended.returncode:
        sys.exit(ended.stderr)


def train_tiny(run_dir: str, out: str, asynchronous: str) -> None:
    """Worker: train the tiny recipe and write when each step of rank 0 ended."""
    from toolkit.engines.distributed import end_process
    from toolkit.train import stages, worker
    from toolkit.train.loop import StepReport, TrainingRun

    ended_s: list[float] = []

    class Timed(TrainingRun):
        def log(self, report: StepReport) -> None:
            ended_s.append(time.perf_counter())
            super().log(report)

    stages.TrainingRun = Timed  # type: ignore[attr-defined]
    overrides = [
        f"training.steps={TINY_STEPS}", "logging.trackers=[]", "evaluation.every_steps=null",
        f"checkpoint.every_steps={INTERVAL_STEPS}", "checkpoint.export=false",
        f"checkpoint.asynchronous={asynchronous}",
    ]  # fmt: skip
    code = worker.train_recipe(TINY, overrides, Path(run_dir))
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(ended_s))
    end_process(code)


def stall(folder: Path, asynchronous: str) -> dict[str, float]:
    """Shares of a 50-step interval that its save costs; the first interval warms up."""
    run_dir, out = folder / "tiny", folder / "tiny.json"
    shutil.rmtree(run_dir, ignore_errors=True)
    launch(2, "train_tiny", run_dir, out, asynchronous)
    ended_s = json.loads(out.read_text())
    steps = [after - before for before, after in pairwise(ended_s)]
    steps = steps[INTERVAL_STEPS - 1 :]  # the first is the one behind the first save
    whole = range(0, len(steps) - INTERVAL_STEPS + 1, INTERVAL_STEPS)
    median = statistics.median(steps)
    interval = INTERVAL_STEPS * median
    # A save of this state is over within ten steps; the others are as noisy as these.
    extra = [sum(steps[at : at + 10]) - sum(steps[at + 20 : at + 30]) for at in whole]
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    saves = [event for event in map(json.loads, lines) if event["kind"] == "save"][1:-1]
    reported = statistics.median(event["stall_s"] for event in saves)
    return {
        "step_s": median,
        "stall_reported": reported / interval,
        "stall_measured": statistics.median(extra) / interval,
        "save_s": statistics.median(event["seconds"] for event in saves),
    }


def save_and_load(recipe: str, folder: str, out: str, *overrides: str) -> None:
    """Worker: save a large state in both ways, verify and load it; write the seconds."""
    import torch
    import torch.distributed as dist

    from toolkit.batch import MicroBatch
    from toolkit.checkpoint.manifest import Manifest
    from toolkit.checkpoint.resume import find_newest
    from toolkit.checkpoint.saved_state import SavedState
    from toolkit.checkpoint.saver import Saver
    from toolkit.checkpoint.store import CheckpointStore
    from toolkit.engines.build import build_engine
    from toolkit.engines.distributed import end_process, join
    from toolkit.engines.setup import EngineSetup
    from toolkit.intake.load import load_recipe
    from toolkit.models import huggingface as hf
    from toolkit.run.assignment import decide

    ranks = join()
    assignment = decide(load_recipe(Path(recipe), overrides), None)
    asked, plan = assignment.recipe, assignment.plan
    config = hf.build_config(asked.model)
    weights = hf.weight_source(asked.model, config, seed=1)
    engine_config = assignment.engine_config
    setup = EngineSetup.of(asked, plan, engine_config, ranks, config, weights)
    engine = build_engine(plan.engine, setup)
    layout = plan.layout
    tokens = torch.zeros(layout.micro_batch, asked.training.sequence_length, dtype=torch.int64)
    batches = [MicroBatch(tokens, tokens)] * layout.gradient_accumulation
    engine.train_step(batches, tokens.numel() * len(batches) * layout.dp, 1e-3)
    store = CheckpointStore(Path(folder), keep=1)
    empty = Manifest(0, 0, 1, None, (), "", plan.engine, plan.model, layout, {}, {})
    seconds = {}

    def timed(name: str, action: Callable[[], Any]) -> Any:
        dist.barrier()
        began = time.perf_counter()
        result = action()
        dist.barrier()
        seconds[name] = time.perf_counter() - began
        return result

    for mode in ("asynchronous", "synchronous"):
        saver = Saver(store, asynchronous=mode == "asynchronous")

        def save(saver: Saver = saver, mode: str = mode) -> None:
            timed(f"{mode} stall", lambda: saver.save(empty, engine.state(), {}))
            saved = saver.finished(wait=True)
            assert saved is not None and saved.problem is None, saved

        timed(f"{mode} save", save)
        saver.close()
    found = timed("verify", lambda: find_newest(store, expected=True))
    state = SavedState(found.folder)
    timed("load", lambda: [state.load(shard) for shard in engine.state()])
    if ranks.rank == 0:
        Path(out).write_text(json.dumps(seconds))
    dist.barrier()
    end_process(0)


def speed(folder: Path, world: int, overrides: list[str]) -> dict[str, float]:
    """Seconds of everything, and the bytes that it was done with."""
    recipe, saved, out = folder / "large.yaml", folder / "saved", folder / "large.json"
    recipe.write_text(LARGE)
    launch(world, "save_and_load", recipe, saved, out, *overrides)
    files = sorted(saved.glob("step-*/state-*.safetensors"))
    nbytes = sum(path.stat().st_size for path in files)
    copies = [folder / f"copy-{path.name}" for path in files]
    began = time.perf_counter()
    copying = [
        subprocess.Popen(
            ["dd", f"if={path}", f"of={copy}", "bs=1M", "conv=fsync", "status=none"]
        )
        for path, copy in zip(files, copies, strict=True)
    ]
    for process in copying:
        assert process.wait() == 0
    copied_s = time.perf_counter() - began
    for path in copies:
        path.unlink()
    shutil.rmtree(saved)
    seconds: dict[str, float] = json.loads(out.read_text())
    return {"bytes": nbytes, "copy": copied_s} | seconds


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(r[key] for r in rounds), 5) for key in rounds[0]}


def speed_summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """GB/s of medians, and medians of the ratios within a round."""
    middle = medians(rounds)
    nbytes = middle.pop("bytes")
    ratios = {
        f"{name} to copy": round(statistics.median(r["copy"] / r[name] for r in rounds), 3)
        for name in ("synchronous save", "asynchronous save", "verify", "load")
    }
    return {
        "gigabytes": round(nbytes / GB, 3),
        "gb_per_s": {name: round(nbytes / s / GB, 3) for name, s in middle.items()},
        "seconds": middle,
        "speed_ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="Disk to measure; default: temporary.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        stalls = {
            mode: medians([stall(folder, value) for _ in range(options.rounds)])
            for mode, value in (("asynchronous", "true"), ("synchronous", "false"))
        }
        speeds = {
            layout: speed_summary([speed(folder, *how) for _ in range(options.rounds)])
            for layout, how in LAYOUTS.items()
        }
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "safetensors")},
        "medians_of": options.rounds,
        "shares_of_50_steps": stalls,
        "against_a_copy": speeds,
    }
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        globals()[sys.argv[2]](*sys.argv[3:])
    else:
        main()
