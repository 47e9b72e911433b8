"""One training run on this machine's GPU, next to its plan: step times, memory, and the kernels
of one step.

    python benchmarks/gpu_steps.py RESULTS.jsonl NAME RECIPE [KEY=VALUE …]

Adds a line to RESULTS.jsonl and a table of kernels to `kernels.txt` beside it. Its text is
Python's standard library, four sequences of 8,192 tokens a step. Nothing is saved unless
`checkpoint.every_steps` is given.

On a machine without a GPU the tiny llama stands in for RECIPE, to try the program: the line has
its losses, and no figure of speed or memory.
"""

import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

results, name, recipe, *settings = sys.argv[1:]
os.environ.update(
    RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
    MASTER_PORT=str(20000 + os.getpid() % 10000),
)  # fmt: skip
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from toolkit.doctor.calibrate import this_machine  # noqa: E402
from toolkit.run import jsonl  # noqa: E402
from toolkit.train import checkpoints, stages, worker  # noqa: E402

STEPS, PROFILED = 12, 10
OVERRIDES = [
    "data.train={kind: text, files: ['{stdlib}/*.py']}", "data.validation=null",
    "data.tokenizer=bytes", "model.hub=null", "training.tokens=null",
    f"training.steps={STEPS}", "training.sequence_length=8192", "training.global_batch_size=4",
    "training.micro_batch_size=1", "parallel.recompute=none", "schedule.warmup_steps=0",
    "logging.trackers=[]", "logging.every_steps=1", "evaluation.every_steps=null",
    "checkpoint.export=false", "cluster.nodes=1",
    "cluster.gpus_per_node=1", f"cluster.gpu={this_machine(1).gpu}",
]  # fmt: skip
GPU = torch.cuda.is_available()
if not GPU:
    recipe, OVERRIDES = "recipes/tiny/llama-bytes.yaml", [
        *OVERRIDES, "training.sequence_length=64", "training.precision=bf16",
    ]  # fmt: skip
seconds: list[float] = []
build = stages.build_engine


def watched(*arguments: Any) -> Any:
    """The engine, each of its steps timed and one of them profiled."""
    engine = build(*arguments)
    step, done = engine.train_step, 0

    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done += 1
        synchronize()
        began = time.perf_counter()
        if GPU and done == PROFILED:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
                out = step(*args, **kwargs)
                torch.cuda.synchronize()
            table = trace.key_averages().table(
                sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=90
            )
            with Path(results).with_name("kernels.txt").open("a") as file:
                file.write(f"\n===== {name}\n{table}\n")
            return out
        out = step(*args, **kwargs)
        synchronize()
        seconds.append(time.perf_counter() - began)
        return out

    engine.train_step = train_step
    return engine


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


stages.build_engine = watched
if not any(one.startswith("checkpoint.every_steps=") for one in settings):
    checkpoints.RunCheckpoints.save = lambda *_: None  # type: ignore[method-assign]
run = Path(mkdtemp()) / name
code = worker.train_recipe(Path(recipe), [*OVERRIDES, *settings], run)
events = jsonl.read(run / "events.jsonl")
compared: dict[str, Any] = next((e for e in events if e["kind"] == "prediction"), {})
metrics = jsonl.read(run / "metrics.jsonl")
mfu = [line["mfu"] for line in metrics[3:] if line.get("mfu")]
row = {
    "name": name,
    "settings": settings,
    "gpu": torch.cuda.get_device_name() if GPU else "cpu",
    "exit": code,
    "losses": [line["loss"] for line in metrics if "loss" in line],
    "first_s": [round(one, 3) for one in seconds[:2]] if GPU else None,
    "step_s": statistics.median(seconds[3:]) if GPU and seconds[3:] else None,
    "mfu": statistics.median(mfu) if GPU and mfu else None,
    "saves": [
        {key: event[key] for key in ("step", "seconds", "stall_s") if key in event}
        for event in events
        if event["kind"] == "save"
    ],
    **{
        key: compared.get(key) if GPU else None
        for key in ("predicted", "measured", "measured_over_predicted")
    },
}
jsonl.append(Path(results), row)
shutil.rmtree(run, ignore_errors=True)
sys.stdout.flush()
os._exit(code)
