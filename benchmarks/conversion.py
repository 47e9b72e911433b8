"""`dmt convert` against a plain copy of the same files: GB/s and peak memory.

    python benchmarks/conversion.py [--rounds 3] [--out benchmarks/results/…json]

The model has llama-3.2-1B's shape with random weights in bf16. In each round the folder is
copied with `cp -r`, converted to a Megatron checkpoint, and converted back; all three end on
disk (the copy is followed by `sync`). Quoted are medians. Peak memory is that of the process,
and as much of it as is there before the first byte is read (`--dry-run`: Python, torch).
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from toolkit.models.convert.safetensors_stream import Entry, write_model
from toolkit.models.convert.source import open_source, shape_of

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def make_model(folder: Path) -> int:
    """Write the random model; its bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    (folder / "model.safetensors").touch()

    def entry(name: str, shape: tuple[int, ...]) -> Entry:
        return Entry(
            name, torch.bfloat16, shape, lambda: torch.randn(shape, dtype=torch.bfloat16)
        )

    tensors = open_source(folder).tensors()
    entries = [entry(name, shape_of(parts)) for name, parts in tensors.items()]
    write_model(folder, entries)
    return sum(entry.nbytes for entry in entries)


def run(command: list[str]) -> tuple[float, float]:
    """Run a program: seconds, and the largest memory it had in GB."""
    started = time.perf_counter()
    pid = os.posix_spawnp(command[0], command, os.environ)
    _, status, usage = os.wait4(pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return time.perf_counter() - started, usage.ru_maxrss * 1024 / 1e9


def dmt(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "toolkit.cli.main", "convert", *arguments]


def one_round(folder: Path) -> dict[str, tuple[float, float]]:
    """Seconds and peak GB of each of the three."""
    model, megatron, back = (str(folder / name) for name in ("model", "megatron", "back"))
    copy = str(folder / "copy")
    copied, memory = run(["cp", "-r", model, copy])
    synced, _ = run(["sync", "-f", copy])
    shutil.rmtree(copy)
    result = {
        "cp -r": (copied + synced, memory),
        "to megatron": run(dmt(model, megatron)),
        "to huggingface": run(dmt(megatron, back)),
    }
    same, _ = run(["cmp", f"{model}/model.safetensors", f"{back}/model.safetensors"])
    assert same, "cmp ends with an error where a byte differs"
    shutil.rmtree(megatron)
    shutil.rmtree(back)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="Disk to measure; default: temporary.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        nbytes = make_model(Path(name) / "model")
        started, base = run(dmt(f"{name}/model", f"{name}/none", "--dry-run"))
        rounds = [one_round(Path(name)) for _ in range(options.rounds)]
    measured = {}
    for what in rounds[0]:
        seconds = statistics.median(result[what][0] for result in rounds)
        measured[what] = {
            "seconds": round(seconds, 2),
            "gb_per_s": round(nbytes / seconds / 1e9, 3),
            "peak_memory_gb": round(max(result[what][1] for result in rounds), 3),
        }
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "model": "llama-3.2-1B's shape, random, bf16",
        "gigabytes": round(nbytes / 1e9, 3),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "safetensors")},
        "start_alone": {"seconds": round(started, 2), "peak_memory_gb": round(base, 3)},
        "medians_of": options.rounds,
        "measured": measured,
    }
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
