"""Findings on a fake GPU. Does not import torch, for code that only reports them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

HOST_WAITS = "the host waits for the GPU"
MIXED = "tensors of two devices meet"
WIDENED = "16-bit activations become fp32"
NOT_NCCL = "NCCL gets a tensor in host memory"

STEP = "resume"
"""The phase of the step that is measured: the first one had no optimizer states yet."""
PHASES = ("build", "evaluate", STEP)


WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer states"
ACTIVATIONS, BACKWARD = "activations", "backward pass"
COMMUNICATION, BUFFERS, OTHER = "communication", "buffers", "other"


@dataclass(frozen=True)
class Peak:
    """A GPU's memory at its peak."""

    nbytes: int
    """What is allocated, in blocks of the allocator."""
    holders: Mapping[str, Mapping[str, int]]
    """Bytes by kind (a constant of this module) and by module or place, the largest first."""


@dataclass(frozen=True)
class SaveCopies:
    """What this rank copies to host memory for one checkpoint."""

    nbytes: int
    from_gpu: int
    """Bytes of those that leave the GPU; the rest is offloaded."""
    tensors: int


@dataclass(frozen=True)
class GpuFinding:
    """An operation with its code location."""

    what: str
    """One of this module's constants."""
    how: str
    """E.g. `item()`, or the devices that met."""
    where: tuple[str, ...]
    """`file.py:line function`, the innermost first."""
    phase: str
    """What the rank was doing: `build`, `step`, `evaluate`, `state`, `save`, `resume`."""


@dataclass(frozen=True)
class Collective:
    """A collective operation that this rank took part in."""

    name: str
    group: str
    """Backend and ranks, e.g. `nccl 0,1`."""
    size: int
    """Ranks of the group."""
    nbytes: int
    """Of its tensors on this rank."""
    phase: str


@dataclass
class RankFindings:
    """All that was found on one rank."""

    findings: list[GpuFinding] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    communicators: dict[str, int] = field(default_factory=dict)
    """Ranks of each process group that NCCL connected for these."""
    state: dict[str, int] = field(default_factory=dict)
    """Elements of each quantity that this rank holds."""
    saved: SaveCopies | None = None
    """None where this rank stands for several, which save a part each."""
    peaks: dict[str, Peak] = field(default_factory=dict)
    """What the GPU holds at its fullest, by phase."""
    flops: dict[str, int] = field(default_factory=dict)
    """Of a step, by module."""
    reserved: int = 0
    """Bytes that PyTorch's allocator has reserved in the end, if it can."""
    least: int = 0
    """The minimum it can work with: when memory runs out, it releases free memory."""
    ended_by: str | None = None
    """The error that tensors of two devices were."""

    def of(self, what: str, phase: str | None = None) -> list[GpuFinding]:
        """The findings of one kind, perhaps of one phase."""
        return [f for f in self.findings if f.what == what and phase in (None, f.phase)]
