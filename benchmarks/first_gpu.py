"""Half an hour on one GPU, planned: which engine computes the right losses there, how fast
kernels and whole steps are next to the planner's table, and what a killed rank does.

    python benchmarks/first_gpu.py wheels FOLDER [--python 3.12] [--without PACKAGE …]
    python benchmarks/first_gpu.py run OUT [PART …]
    python benchmarks/first_gpu.py table OUT

`wheels` collects on a machine with an index what a GPU machine without one lacks; there,
`pip install --no-index --no-deps FOLDER/*.whl`. `run` does the parts in their order, each
program of them in a process group of its own with a limit; at most seven files in OUT, which
grow as it goes, so that what a limit or the scheduler ends is kept. `table` prints them.

Without a GPU `run` tries the plan: tiny shapes stand in, losses are compared, and every figure
that only a GPU has stays empty. Exit code 1 if a program failed.

Several programs on one GPU share it: losses run at once, whatever is timed runs alone.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from toolkit.launchers.process import die_with_parent
from toolkit.run import jsonl
from toolkit.system.install import NAME

HERE = Path(__file__).parent
ROOT = HERE.parent
BILLION, EIGHT = "llama-3.2-1b-pretrain", "llama-3.1-8b-pretrain"
PRESENT = ("torch", "triton")
"""What a GPU machine has, in versions that fit its driver; NVIDIA's libraries come with it."""
NEEDED = (NAME, "torchao", "liger-kernel")
"""By the programs below."""
PURE = "deepspeed"
"""Has no wheel; its operators are compiled where they run."""
GLIBCS = ("2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2_12", "2_5")
SLOWER = 5
"""Limits are for GPUs; a processor that only tries the plan has so many times as long."""


@dataclass(frozen=True)
class Program:
    """What runs, for at most how long. `{out}` is the folder of results."""

    name: str
    limit_s: int
    command: tuple[str, ...]
    on_cpu: tuple[str, ...] = ()
    """Further arguments where it is only tried."""


def program(name: str, limit_s: int, file: str, *arguments: str) -> Program:
    """A benchmark of this folder."""
    return Program(name, limit_s, (str(HERE / file), *arguments))


def step(name: str, recipe: str, *settings: str) -> Program:
    """A timed training."""
    file = f"recipes/llama/{recipe}.yaml"
    return program(name, 90, "gpu_steps.py", "{out}/steps.jsonl", name, file, *settings)


def losses(name: str, limit_s: int, ranks: int, *arguments: str) -> Program:
    """Layouts next to plain transformers."""
    options = ("{out}/ranks.jsonl", "losses", "--ranks", str(ranks), *arguments)
    return replace(program(name, limit_s, "gpu_ranks.py", *options), on_cpu=("--jobs", "1"))


FSDP = ("parallel.engine=fsdp", "parallel.zero.stage=2")
FOUR = (*FSDP, "model.config.num_hidden_layers=4")
"""Four layers of 8B with their fp32 masters and moments fit on 80 GB."""
PARTS: dict[str, tuple[Program, ...]] = {
    "losses": (
        losses("fp32", 240, 1, "--jobs", "6", "--step", "losses fp32"),
        losses("16 and 8 bits, experts", 240, 1, "--jobs", "6", "--step", "losses bf16",
               "losses fp8", "experts"),
    ),
    "kernels": (program("kernels", 150, "gpu_kernels.py", "{out}/kernels.json"),),
    "steps": (
        step("1b-fsdp", BILLION, *FSDP),
        step("1b-deepspeed", BILLION, "parallel.engine=deepspeed", "parallel.zero.stage=2"),
        step("1b-megatron", BILLION, "parallel.engine=megatron", "parallel.model=megatron"),
        step("1b-ddp", BILLION, "parallel.engine=ddp"),
        step("8b4-fsdp", EIGHT, *FOUR),
        step("8b4-eager", EIGHT, *FOUR, "kernels.compile=none"),
        step("8b4-sdpa", EIGHT, *FOUR, "kernels.attention=sdpa"),
        step("8b4-fp8", EIGHT, *FOUR, "fp8.recipe=rowwise"),
        step("8b4-recompute", EIGHT, *FOUR, "parallel.recompute=full"),
    ),
    "ranks": (
        losses("two ranks", 300, 2, "--jobs", "3", "--step", "losses fp32"),
        program("a rank is killed", 200, "gpu_ranks.py", "{out}/ranks.jsonl", "killed"),
    ),
    "resume": (
        Program("resume", 150, ("-m", "toolkit.cli.main", "doctor", "--selftest", "--only",
                                "resume", "--folder", "{out}/selftest")),
    ),
    "against": (
        replace(
            program("Trainer, torchtitan", 540, "gpu.py", "--pairs", "1", "--steps", "20",
                    "--out", "{out}/against.json"),
            on_cpu=("--shape", "tiny"),
        ),
    ),
}  # fmt: skip
"""By name, in the order of what is known least. Each takes less than ten minutes."""


def run(out: Path, parts: Iterable[str]) -> int:
    """Do these parts; 1 if a program of them failed or came to its limit."""
    import torch

    on_gpu, failed = torch.cuda.is_available(), False
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        for one in PARTS[part]:
            began = time.monotonic()
            code = end_of(one, out, on_gpu)
            seconds = round(time.monotonic() - began, 1)
            row = {"part": part, "program": one.name, "exit": code, "seconds": seconds}
            jsonl.append(out / "programs.jsonl", row)
            outcome = "ok" if code == 0 else code
            print(f"{part}: {one.name}: {outcome} after {seconds} s", flush=True)
            failed |= code != 0
    return int(failed)


def end_of(one: Program, out: Path, on_gpu: bool) -> int | str:
    """Exit code of a program, or that it took too long; nothing of it runs on."""
    arguments = [part.format(out=out) for part in one.command]
    command = [sys.executable, *arguments, *(() if on_gpu else one.on_cpu)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    limit_s = one.limit_s * (1 if on_gpu else SLOWER)
    with (out / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGTERM),
        )  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"not done after {limit_s} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def tables(out: Path) -> Iterator[str]:
    """Lines of Markdown: what was compared, and what only a GPU can fill."""
    yield from table(("part", "program", "exit", "seconds"), jsonl.read(out / "programs.jsonl"))
    ranks = jsonl.read(out / "ranks.jsonl")
    compared = [row for row in ranks if row["step"] != "killed"]
    yield from table(("step", "name", "ranks", "verdict", "found"), compared)
    killed = [row for row in ranks if row["step"] == "killed"]
    yield from table(("name", "trained", "code", "seconds"), killed)
    kernels = loaded(out / "kernels.json")
    rows = [{"kernel": name, **row} for name, row in kernels.items() if name != "machine"]
    yield from table(("kernel", "ms", "tflops", "gb_per_s", "peak_gib", "error"), rows)
    steps = jsonl.read(out / "steps.jsonl")
    rows = [{**row, "loss": row["losses"][-1] if row["losses"] else None} for row in steps]
    yield from table(
        ("name", "gpu", "exit", "loss", "step_s", "mfu", "predicted", "measured"), rows
    )
    against = loaded(out / "against.json")
    sides: dict[str, float] = against.get("milliseconds_per_step", {})
    on_gpu = against.get("gpu") != "cpu"
    rows = [{"side": side, "ms": ms if on_gpu else None} for side, ms in sides.items()]
    yield from table(("side", "ms"), rows)


def loaded(file: Path) -> dict[str, Any]:
    """A result; none of a part that did not run."""
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return result


def table(columns: tuple[str, ...], rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A table in Markdown; what a row lacks is an empty cell."""
    yield from ("", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|")
    for row in rows:
        cells = ["" if row.get(column) is None else str(row[column]) for column in columns]
        yield f"| {' | '.join(cells)} |"


def wheels(folder: Path, python: str, without: Iterable[str]) -> int:
    """Wheels of DMT and of what it needs, in the versions of this environment, but not of
    what the GPU machine has."""
    names = closure(NEEDED, {*map(canonicalize_name, without), *PRESENT})
    versions = {name: distribution(name).version for name in names - {NAME}}
    pip = (sys.executable, "-m", "pip")
    target = ["--python-version", python, "--implementation", "cp", "-d", str(folder)]
    target += [f"--platform=manylinux_{glibc}_x86_64" for glibc in GLIBCS]
    binary = [f"{name}=={version}" for name, version in versions.items() if name != PURE]
    download = [*pip, "download", "-q", "--no-deps", "--only-binary=:all:", *target, *binary]
    subprocess.run(download, check=True)
    sources = [str(ROOT), *(f"{name}=={versions[name]}" for name in {PURE} & {*versions})]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, *sources], env=os.environ | {"DS_BUILD_OPS": "0"}, check=True)
    files = sorted(folder.glob("*.whl"))
    print(f"{len(files)} wheels, {sum(file.stat().st_size for file in files) / 2**20:.0f} MiB")
    return 0


def closure(names: Iterable[str], without: set[str]) -> set[str]:
    """Distributions and all that they require here, by canonical name."""
    known, todo = set[str](), [*names]
    while todo:
        name = canonicalize_name(todo.pop())
        if name in known | without or name.startswith(("nvidia-", "cuda-")):
            continue
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:  # for another system
            continue
        known.add(name)
        required = [Requirement(line) for line in lines]
        todo += [
            one.name for one in required if not one.marker or one.marker.evaluate({"extra": ""})
        ]
    return known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    collect = verbs.add_parser("wheels")
    collect.add_argument("folder", type=Path)
    collect.add_argument("--python", default="3.12")
    collect.add_argument("--without", nargs="*", default=(), metavar="PACKAGE")
    started = verbs.add_parser("run")
    started.add_argument("out", type=Path)
    started.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    verbs.add_parser("table").add_argument("out", type=Path)
    options = parser.parse_args()
    if options.verb == "wheels":
        return wheels(options.folder, options.python, options.without)
    out = options.out.resolve()
    if options.verb == "run":
        if unknown := [part for part in options.parts if part not in PARTS]:
            parser.error(f"found part {unknown[0]}; parts: {', '.join(PARTS)}")
        return run(out, options.parts or PARTS)
    print("\n".join(tables(out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
