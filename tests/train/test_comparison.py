"""Predicted against measured: the numbers and the words."""

from dataclasses import replace

import pytest

from toolkit.plan.hardware.cluster import Basis
from toolkit.plan.hardware.cluster_file import load_cluster
from toolkit.run.comparison import (
    Prediction,
    RunMeasurement,
    differences,
    event_fields,
    summary_numbers,
)

ON_GPU = RunMeasurement(step_time_s=2.2, steps=99, memory_gib=66.0, process_gib=None)
ON_CPU = RunMeasurement(step_time_s=0.11, steps=19, memory_gib=None, process_gib=0.9)


def rows(predicted: Prediction, measured: RunMeasurement) -> dict[str, str]:
    return dict(differences(event_fields(predicted, measured)))


def test_memory_beyond_what_is_allocated_is_shown() -> None:
    """It runs out first."""
    predicted = Prediction(2.0, 60.0, "data sheet", 64.0, 1.1)
    full = replace(ON_GPU, reserved_gib=75.0, outside_gib=2.0, retries=3)
    found = rows(predicted, full)
    assert found["reserved"] == "75.00 GiB measured, 64.00 GiB predicted"
    assert found["CUDA and NCCL"] == "2.00 GiB measured, 1.10 GiB predicted"
    assert "3 times" in found["allocator"]


@pytest.mark.parametrize(
    ("basis", "measured", "step_time", "memory"),
    [
        (
            "data sheet",
            ON_GPU,
            "2.20 s measured, 2.00 s predicted from data sheets (+10%)",
            "10%",
        ),
        ("calibrated", ON_GPU, "2.20 s measured, 2.00 s predicted from measured speeds", "10%"),
        # An unmeasured processor has no prediction to be right or wrong about.
        (
            "nominal",
            ON_CPU,
            "110 ms measured (`dmt doctor --calibrate`",
            "libraries (predicted",
        ),
    ],
)
def test_what_is_shown(
    basis: Basis, measured: RunMeasurement, step_time: str, memory: str
) -> None:
    fields = event_fields(Prediction(2.0, 60.0, basis, 64.0, 1.1), measured)
    assert (fields["measured_over_predicted"]["step_time"] is None) == (basis == "nominal")
    shown = dict(differences(fields))
    assert shown["step time"].startswith(step_time) and memory in shown["peak memory"]


def test_summary_is_flat() -> None:
    fields = event_fields(Prediction(2.0, 60.0, "data sheet", 64.0, 1.1), ON_GPU)
    assert summary_numbers({"kind": "prediction", "step": 7, **fields}) == {
        "predicted/step_time_s": 2.0,
        "predicted/memory_gib": 60.0,
        "predicted/basis": "data sheet",
        "predicted/reserved_gib": 64.0,
        "predicted/outside_gib": 1.1,
        "measured/step_time_s": 2.2,
        "measured/steps": 99,
        "measured/memory_gib": 66.0,
        "measured_over_predicted/step_time": pytest.approx(1.1),
        "measured_over_predicted/memory": pytest.approx(1.1),
    }


@pytest.mark.parametrize(
    ("measured", "gpu", "expected"),
    [
        ("", "cpu", "nominal"),
        ("", "h100-80gb", "data sheet"),
        ("measured: {tflops: {fp32: 0.1}}\n", "cpu", "calibrated"),
        ("measured: {memory_gigabytes_per_s: 2000}\n", "h100-80gb", "calibrated"),
    ],
)
def test_basis(
    tmp_path_factory: pytest.TempPathFactory, measured: str, gpu: str, expected: Basis
) -> None:
    file = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    file.write_text(f"nodes: 1\ngpus_per_node: 2\ngpu: {gpu}\n{measured}")
    assert load_cluster(file).basis == expected
