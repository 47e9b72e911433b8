"""`dmt doctor --calibrate`: real measurements, short ones, and the file that they become."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.doctor.measuring import calibrated
from tests.forked import run_ranks
from toolkit.cli.main import main
from toolkit.doctor import calibrate as calibration
from toolkit.doctor import speeds
from toolkit.doctor.calibrate import (
    Machine,
    check_known,
    cluster_text,
)
from toolkit.doctor.speeds import Speeds
from toolkit.errors import BackendUnavailable
from toolkit.plan.hardware.catalogue import name_of_device
from toolkit.plan.hardware.cluster_file import load_cluster

SPEEDS = Speeds(
    processes=2,
    matmul_flops={"fp32": 1.234e11, "bf16": 9.87e7},
    memory_bytes_per_s=1.2345e10,
    link_bytes_per_s=4.56e8,
)


def test_the_file_says_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(cluster_text(Machine("cpu", 2), SPEEDS))
    cluster = load_cluster(file)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu.name) == (1, 2, "cpu")
    measured = cluster.gpu.measured
    assert measured is not None
    assert measured.fp32 == pytest.approx(1.23e11)
    assert measured.bf16 == pytest.approx(9.87e7)
    assert measured.memory_bytes_per_s == pytest.approx(1.23e10)
    assert cluster.node_link.measured_bytes_per_s == pytest.approx(4.56e8)
    assert cluster.node_link.kind == "shared"
    alone = Speeds(1, {"fp32": 1e11}, 1e10, None)  # no ring of one process
    file.write_text(cluster_text(Machine("h100-80gb", 1), alone))
    link = load_cluster(file).node_link
    assert link.measured_bytes_per_s is None and link.kind == "nvlink"


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-80gb-pcie"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
    ],
)
def test_drivers_names(device: str, expected: str) -> None:
    assert name_of_device(device) == expected
    check_known(Machine(expected, 2))


@pytest.mark.parametrize(
    "device", ["Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 4090 D", "NVIDIA GH200 144G HBM3e"]
)
def test_unknown_devices_are_calibrated_by_nobody(device: str) -> None:
    with pytest.raises(BackendUnavailable, match=device):
        check_known(Machine(name_of_device(device), 2))


def test_command_prints_json_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verb around a measurement (which the next test makes for real)."""
    monkeypatch.setattr(calibration, "calibrate", lambda _: SPEEDS)
    file = tmp_path / "mine.yaml"
    arguments = ["--calibrate", "--out", str(file), "--json"]
    assert main(["doctor", *arguments]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["gpu"] == "cpu" and found["file"] == str(file)
    assert found["matmul_flops"]["fp32"] == 1.234e11
    assert printed.err == ""
    assert load_cluster(file).gpu.measured is not None


@pytest.mark.slow
def test_two_processes_measure_together() -> None:
    """Small sizes: every number is there, plausible, and the same on both ranks."""
    found, other = run_ranks(calibrated, 2)
    assert found == other
    assert found.processes == 2
    assert set(found.matmul_flops) == {"fp32", "bf16"}
    assert all(1e7 < flops < 1e14 for flops in found.matmul_flops.values())
    assert 1e8 < found.memory_bytes_per_s < 1e13
    assert found.link_bytes_per_s is not None and 1e5 < found.link_bytes_per_s < 1e12


@pytest.mark.parametrize(("seconds", "rows"), [(1.0, [8]), (1e-6, [8, 64])])
def test_a_precision_that_a_processor_emulates_takes_no_minutes(
    seconds: float, rows: list[int]
) -> None:
    """2,048 rows in bf16 took seven minutes of a processor without units for it."""
    seen = []

    def timed(product: Callable[[], torch.Tensor]) -> float:
        seen.append(len(product()))
        return seconds

    bench: Any = SimpleNamespace(device="cpu", seconds=timed)
    assert speeds._matmul_flops(bench, 64, torch.bfloat16) == 2 * rows[-1] ** 3 / seconds
    assert seen == rows
