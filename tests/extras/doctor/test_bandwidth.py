"""`dmt doctor --bandwidth`: real collectives, and what their times mean."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter

from tests.extras.doctor.measuring import bandwidth_alone
from tests.forked import ForkedRanks
from toolkit.cli.main import main
from toolkit.doctor import calibrate
from toolkit.extras.doctor.bandwidth import Bandwidth, _peaks

FACTORS = {"all-reduce": 1.0, "all-gather": 0.5, "reduce-scatter": 0.5, "p2p": 1.0}
"""Bus over algorithm bandwidth of two ranks: nccl-tests' PERFORMANCE.md with n = 2."""


@pytest.mark.slow
def test_two_ranks_as_under_any_launcher(tmp_path: Path) -> None:
    """RANK is set, so the processes measure with each other; rank 0 alone prints."""
    ranks = ForkedRanks(bandwidth_alone, (), 2, tmp_path)
    assert ranks.end() == [0, 0], ranks.printed()
    first, second = (path.read_text() for path in ranks.outputs)
    assert second == ""
    found = TypeAdapter(Bandwidth).validate_json(first)
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
    assert _peaks("Tesla P40", 1, 2) == (None, None)


def with_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with GPUs that the hardware catalogue lacks."""
    device = SimpleNamespace(name="Tesla P40")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: device)


def test_a_gpu_of_no_catalogue_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks need no data sheet to talk; only what is written for the planner does."""
    with_gpus(2, monkeypatch)
    machine = calibrate.this_machine(None)
    assert (machine.gpu, machine.processes) == ("Tesla P40", 2)
    assert main(["doctor", "--calibrate"]) == 3
    assert "does not know 'Tesla P40'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "arguments", "fix"),
    [
        (1, [], "on two machines: torchrun --nnodes 2"),
        (1, ["--processes", "1"], "on two machines: torchrun --nnodes 2"),
        (2, ["--processes", "1"], "fix: leave --processes out"),
    ],
)
def test_one_process_is_told_where_others_are(
    gpus: int,
    arguments: list[str],
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with_gpus(gpus, monkeypatch)
    assert main(["doctor", "--bandwidth", *arguments]) == 2
    assert fix in capsys.readouterr().err
