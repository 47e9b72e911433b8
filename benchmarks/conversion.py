"""`dmt convert` against a plain copy of the same files: GB/s and peak memory.

    python benchmarks/conversion.py [--rounds 3] [--out benchmarks/results/…json]

The model has llama-3.2-1B's shape with random weights in bf16. In each round the folder is
copied with `cp -r`, converted to a Megatron checkpoint, and converted back; all three end on
disk (the copy is followed by `sync`). Quoted are medians; times include the start of Python.
Peak memory is anonymous memory, sampled; peak resident memory also counts the pages of the
model's files that are mapped, which the kernel takes back at will. `start_alone` is
`--dry-run`: what there is before the first weight is read.
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
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

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


def make_model(folder: Path) -> None:
    """Write the random model."""
    import torch

    from toolkit.extras.convert.source import open_source, shape_of
    from toolkit.models.safetensors_stream import TensorToWrite, write_model

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))

    def entry(name: str, shape: tuple[int, ...]) -> TensorToWrite:
        return TensorToWrite(
            name, torch.bfloat16, shape, lambda: [torch.randn(shape, dtype=torch.bfloat16)]
        )

    tensors = open_source(folder).tensors()
    write_model(folder, [entry(name, shape_of(parts)) for name, parts in tensors.items()])


class Run(NamedTuple):
    """What one program took."""

    seconds: float
    anonymous_gb: float
    resident_gb: float


def run(command: list[str]) -> Run:
    """Run a program and watch its memory."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak_kb = {"RssAnon": 0, "VmHWM": 0}
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        for line in lines:
            name, _, value = line.partition(":")
            if name in peak_kb:
                peak_kb[name] = max(peak_kb[name], int(value.split()[0]))
        time.sleep(0.005)
    if process.wait():
        sys.exit(f"{' '.join(command)} failed")
    seconds = time.perf_counter() - started
    return Run(seconds, peak_kb["RssAnon"] / 1e6 * 1.024, peak_kb["VmHWM"] / 1e6 * 1.024)


def dmt(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "toolkit.cli.main", "convert", *arguments]


def one_round(folder: Path) -> dict[str, Run]:
    """What each of the three took."""
    model, megatron, back = (str(folder / name) for name in ("model", "megatron", "back"))
    copy = str(folder / "copy")
    copied = run(["cp", "-r", model, copy])
    synced = run(["sync", "-f", copy])
    result = {
        "cp -r": copied._replace(seconds=copied.seconds + synced.seconds),
        "to megatron": run(dmt(model, megatron)),
        "to huggingface": run(dmt(megatron, back)),
    }
    run(["cmp", f"{model}/model.safetensors", f"{back}/model.safetensors"])
    for name in (megatron, back, copy):
        shutil.rmtree(name)
    return result


def summary(runs: list[Run], nbytes: int) -> dict[str, float]:
    """Median speed and highest memory."""
    seconds = statistics.median(one.seconds for one in runs)
    return {
        "seconds": round(seconds, 2),
        "gb_per_s": round(nbytes / seconds / 1e9, 3),
        "peak_memory_gb": round(max(one.anonymous_gb for one in runs), 3),
        "peak_resident_with_mapped_files_gb": round(max(one.resident_gb for one in runs), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="Disk to measure; default: temporary.")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.make:
        make_model(options.make)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        run([sys.executable, __file__, "--make", f"{name}/model"])
        nbytes = (Path(name) / "model" / "model.safetensors").stat().st_size
        start = run(dmt(f"{name}/model", f"{name}/none", "--dry-run"))
        rounds = [one_round(Path(name)) for _ in range(options.rounds)]
    measured = {
        what: summary([result[what] for result in rounds], nbytes) for what in rounds[0]
    }
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "model": "llama-3.2-1B's shape, random, bf16",
        "gigabytes": round(nbytes / 1e9, 3),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "safetensors")},
        "start_alone": summary([start], 0),
        "medians_of": options.rounds,
        "measured": measured,
    }
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
