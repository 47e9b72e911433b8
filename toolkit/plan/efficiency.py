"""The one table of calibrated constants: how much of a peak real programs reach.

Everything else that the time model knows is a data sheet (`toolkit.hardware`) or is counted
(`toolkit.plan.operators`). A constant belongs to a device, a link, a kernel or an engine.
"""

from dataclasses import dataclass, field
from collections.abc import Mapping


@dataclass(frozen=True, eq=False)
class Efficiency:
    matmul: Mapping[str, float] = field(
        default_factory=lambda: {
            "v100-32gb": 0.80,
            "a100-40gb": 0.80,
            "a100-40gb-pcie": 0.72,
            "a100-80gb": 0.86,
            "a100-80gb-pcie": 0.76,
            "h100-80gb": 0.72,
            "h100-80gb-pcie": 0.60,
            "h100-96gb": 0.60,
            "h200": 0.72,
            "b200": 0.72,
            "gb200": 0.72,
            "mi300x": 0.55,
            "cpu": 0.7,
        }
    )
    memory: float = 0.80
    half_k: float = 128.0
    attention: Mapping[str, float] = field(
        default_factory=lambda: {
            "volta": 0.4,
            "ampere": 0.55,
            "hopper": 0.35,
            "blackwell": 0.35,
            "cdna3": 0.3,
            "cpu": 0.5,
            "hopper-te": 0.55,
            "blackwell-te": 0.5,
        }
    )
    attention_half_seq: float = 512.0
    link: Mapping[str, float] = field(
        default_factory=lambda: {
            "nvlink": 0.78,
            "xgmi": 0.70,
            "pcie": 0.70,
            "infiniband": 0.80,
            "roce": 0.75,
            "ethernet": 0.7,
            "shared": 0.5,
        }
    )
    contention: float = 0.3
    """seconds lost per second of overlapped communication"""
    fsdp_contention: float = 0.8
    tensor_overlap_exposed: float = 0.35
    kernel_s: float = 6e-6
    gap_s: float = 2e-6
    step_overhead_s: float = 5e-3
    jitter: float = 0.0


DEFAULT = Efficiency()
