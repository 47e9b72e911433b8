"""The self-test's report entries and its folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from toolkit.doctor.calibrate import Machine
from toolkit.errors import RunFailed

CheckVerdict = Literal["ok", "measured", "skipped", "failed"]
"""measured: without a bound."""
ATTENTION_FILE = "attention.json"
"""In a rehearsed layout's folder: the attention kernels that computed it."""
LIMIT_S = 900.0
"""A part that takes longer hangs."""


@dataclass(frozen=True)
class Check:
    """One part of the self-test."""

    step: str
    """What is looked at, e.g. `losses bf16`."""
    name: str
    """In what, e.g. a layout."""
    verdict: CheckVerdict
    found: str
    """One line: numbers, or why it failed or was not run."""
    bound: str = ""
    """The bound of `found`."""
    log: str = ""
    """Where the whole output of a failed part is, relative to the self-test's folder."""
    tail: str = ""
    """Its end."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """What was measured, for programs."""


@dataclass(frozen=True)
class Workplace:
    """Where a self-test runs."""

    machine: Machine
    folder: Path
    """It has a separate folder for every part."""

    @property
    def on_gpu(self) -> bool:
        """Whether the machine's GPUs are tested, and not its processor."""
        return self.machine.gpu != "cpu"


class LoggedFailure(RunFailed):
    """A part of the self-test failed: its first line, the log's place and the log's end."""

    def __init__(self, why: str, log: Path, tail: str) -> None:
        super().__init__(why)
        self.log, self.tail = log, tail
