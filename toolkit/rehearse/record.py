"""The record of a rehearsed layout, step by step; written by its rank 0, read by the
command."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.run import jsonl

_STEPS = "steps.jsonl"


@dataclass(frozen=True)
class Record:
    """Loss and gradient norm of each step that was taken; equally long."""

    loss: tuple[float, ...] = ()
    grad_norm: tuple[float, ...] = ()


def write_step(folder: Path, loss: float, grad_norm: float) -> None:
    """Add one step to the record in `folder`, all digits kept."""
    jsonl.append(folder / _STEPS, {"loss": loss, "grad_norm": grad_norm})


def read_record(folder: Path) -> Record:
    """The steps that were written to `folder`; empty if the layout did not get that far."""
    lines = jsonl.read(folder / _STEPS)
    return Record(
        tuple(float(line["loss"]) for line in lines),
        tuple(float(line["grad_norm"]) for line in lines),
    )
