"""Two-process layouts of every engine, and what two equal runs have in common."""

from pathlib import Path
from typing import Any

from tests.e2e.product import events, records
from toolkit.checkpoint.manifest import Manifest

LAYOUTS: dict[str, dict[str, object]] = {
    "ddp": {},
    "zero1": {"parallel.engine": "deepspeed", "parallel.zero.stage": 1},
    "zero2": {"parallel.engine": "deepspeed", "parallel.zero.stage": 2},
    "zero3": {"parallel.engine": "deepspeed", "parallel.zero.stage": 3},
    "fsdp3": {"parallel.engine": "fsdp", "parallel.zero.stage": 3},
    "megatron-tp2": {"parallel.engine": "megatron", "parallel.tensor": 2},
    "megatron-pp2": {"parallel.engine": "megatron", "parallel.pipeline": 2},
}
_CLOCKS = ("tokens_per_s", "step_time_s", "data_wait_s", "mfu", "memory_gib")


def outcome(run_dir: Path) -> dict[str, Any]:
    """All that training made: equal in two runs means equal to the bit."""
    metrics = records(run_dir / "metrics.jsonl")
    last = max((run_dir / "checkpoints").glob("step-????????"))
    manifest = Manifest.read(last)
    return {
        "metrics": [{k: v for k, v in line.items() if k not in _CLOCKS} for line in metrics],
        "validation": events(run_dir, "evaluation")[-1]["loss"],
        "cursor": (
            *(manifest.step, manifest.optimizer_steps),
            *(manifest.consumed_samples, manifest.consumed_tokens),
        ),
        "state": {name: record.sha256 for name, record in manifest.files.items()},
        "export": {
            path.name: path.read_bytes()
            for path in sorted((run_dir / "export").iterdir())
            if path.name != "README.md"  # has the whole recipe
        },
    }
