"""`dmt convert`: between a Hugging Face folder and a Megatron checkpoint."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.bars import byte_progress
from toolkit.cli.options import AsJson
from toolkit.cli.output import output
from toolkit.errors import DataError, RunFailed
from toolkit.models.agreement import Agreement
from toolkit.models.families import model_spec
from toolkit.system.interpreter import python
from toolkit.text.terminal import tell
from toolkit.text.units import human

if TYPE_CHECKING:
    from toolkit.extras.convert.source import ConvertibleModel
    from toolkit.extras.convert.to_experts import ToExperts
    from toolkit.extras.convert.to_huggingface import ToHuggingFace
    from toolkit.extras.convert.to_megatron import ToMegatron

_Config = Annotated[
    Path | None,
    typer.Option(help="Hugging Face config.json of a Megatron checkpoint without one."),
]
_Multiple = Annotated[
    int,
    typer.Option(
        min=1,
        help="Pad the Megatron vocabulary to a multiple of this "
        "(Megatron-LM: --make-vocab-size-divisible-by times TP), or assume that padding.",
    ),
]
_Experts = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Write a mixture of so many experts, each a copy of the dense model's MLP "
        "(llama, mistral, qwen3), as a Hugging Face folder.",
    ),
]
_Seed = Annotated[
    int, typer.Option(min=0, help="With --to-experts: what routers are drawn from.")
]


def convert(
    src: Annotated[
        Path,
        typer.Argument(help="Hugging Face folder, or Megatron checkpoint (torch_dist)."),
    ],
    dst: Annotated[Path, typer.Argument(help="Folder to write, new or empty.")],
    config: _Config = None,
    vocab_multiple: _Multiple = 128,
    to_experts: _Experts = None,
    seed: _Seed = 1234,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare logits with transformers on the same tokens."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done; write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert a model between Hugging Face and Megatron, in the direction that SRC determines,
    or a dense one into experts.

    Holds a part of one tensor in memory at a time. One Megatron checkpoint serves every TP, PP
    and EP. DST appears when it is complete. An error or Ctrl-C leaves nothing; a process that
    is killed (SIGTERM, SIGKILL) leaves a hidden folder `.DST.partial-…` next to DST; delete it.

    Example: `dmt convert ./Llama-3.2-1B ./llama-megatron --verify`
    """
    from toolkit.extras.convert.source import open_source
    from toolkit.models.new_folder import check_destination

    source = open_source(src, config)
    if to_experts and verify:
        raise DataError("--verify compares with megatron-core", fix="leave --verify out")
    job = _job(source, vocab_multiple, to_experts, seed)
    check_destination(src, dst, job.nbytes)
    report: dict[str, Any] = {
        "direction": _direction(source, to_experts),
        "model_type": source.family,
        "parameters": model_spec(source.config).total,
        "bytes": job.nbytes,
        "notes": [*source.notes, *job.notes],
        "dry_run": dry_run,
    }
    if not dry_run:
        report["seconds"] = _write(job, dst)
        if verify:
            report["verify"] = _verify(source, dst)
    output(as_json, report, _lines(report, dst), wrap=False)


def _direction(source: "ConvertibleModel", experts: int | None) -> str:
    if experts:
        return f"dense to {experts} experts"
    ends = ["huggingface", "megatron"]
    return " to ".join(reversed(ends) if source.is_megatron else ends)


def _job(
    source: "ConvertibleModel", vocab_multiple: int, experts: int | None, seed: int
) -> "ToHuggingFace | ToMegatron | ToExperts":
    if experts:
        from toolkit.extras.convert.to_experts import ToExperts

        return ToExperts(source, experts, seed)
    if source.is_megatron:
        from toolkit.extras.convert.to_huggingface import ToHuggingFace

        return ToHuggingFace(source, vocab_multiple)
    from toolkit.extras.convert.to_megatron import ToMegatron

    return ToMegatron(source, vocab_multiple)


def _write(job: "ToHuggingFace | ToMegatron | ToExperts", dst: Path) -> float:
    """Convert, with a bar; seconds that it took."""
    from toolkit.models.new_folder import appearing

    started = time.perf_counter()
    with appearing(dst) as folder, byte_progress("convert", job.nbytes) as tick:
        job.write(folder, tick)
    return time.perf_counter() - started


def _verify(source: "ConvertibleModel", dst: Path) -> Agreement:
    """Compare the logits of both sides in a separate process. Raises RunFailed."""
    folders = (dst, source.folder) if source.is_megatron else (source.folder, dst)
    command = [*python(), "-m", "toolkit.extras.convert.verify"]
    command += [*map(str, folders), str(source.config_file)]
    # On the CPU, where both sides compute in fp32 alike, also on a machine with a GPU.
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=hidden)
    if done.returncode != 0:
        raise RunFailed(f"{dst} is written, but comparing failed:\n{done.stderr[-2000:]}")
    found = Agreement(**json.loads(done.stdout.splitlines()[-1]))
    found.check(dst, source.folder)
    return found


def _lines(report: dict[str, Any], dst: Path) -> Iterator[str]:
    for note in report["notes"]:
        tell(f"note: {note}")
    size = report["bytes"] / 1e9
    what = f"{report['model_type']}, {human(report['parameters'])} parameters, {size:.2f} GB"
    yield f"{report['direction']}: {what}"
    if report["dry_run"]:
        yield f"would write {dst}"
        return
    speed = size / max(report["seconds"], 1e-9)
    yield f"wrote {dst} in {report['seconds']:.1f} s ({speed:.2f} GB/s)"
    if "verify" in report:
        yield str(report["verify"])
