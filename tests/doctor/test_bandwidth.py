"""`dmt doctor --bandwidth`: real collectives, and what their times mean."""

import json

import pytest

from tests.processes import run_ranks
from toolkit.doctor.bandwidth import Bandwidth, _peaks

FACTORS = {"all-reduce": 1.0, "all-gather": 0.5, "reduce-scatter": 0.5, "p2p": 1.0}
"""Bus over algorithm bandwidth of two ranks: nccl-tests' PERFORMANCE.md with n = 2."""


@pytest.mark.slow
def test_two_ranks_as_under_any_launcher() -> None:
    """RANK is set, so the processes measure with each other; rank 0 alone prints."""
    worker = (
        "import sys; from toolkit.doctor import bandwidth; from toolkit.cli.main import main;"
        "bandwidth.BUDGET_S = 0.02; bandwidth.CPU_SIZES = (6, 4096);"
        "main(['doctor', '--bandwidth', '--json'])"
    )
    first, second = run_ranks(["-c", worker], world=2)
    assert second == ""
    found = Bandwidth.from_dict(json.loads(first))
    assert (found.gpu, found.nodes, found.world) == ("cpu", 1, 2)
    assert [(rate.operation, rate.message_bytes) for rate in found.rates] == [
        (operation, size) for operation in FACTORS for size in (8, 4096)
    ]
    for rate in found.rates:
        assert rate.algorithm_bytes_per_s == pytest.approx(rate.message_bytes / rate.seconds)
        factor = FACTORS[rate.operation]
        assert rate.bus_bytes_per_s == pytest.approx(factor * rate.algorithm_bytes_per_s)
        assert rate.peak_bytes_per_s == 5e9


def test_peaks() -> None:
    """A ring leaves a machine through all adapters; one message has one adapter's share."""
    assert _peaks("h100-80gb", 1, 8) == (450e9, 450e9)
    assert _peaks("h100-80gb", 4, 8) == (400e9, 50e9)
    assert _peaks("h100-80gb", 4, 1) == (50e9, 50e9)
    assert _peaks("NVIDIA GeForce RTX 4090", 1, 2) == (None, None)
