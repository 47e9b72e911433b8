"""The accelerator table: right by its data sheets, and clear about unknown names."""

import pytest

from toolkit.errors import PlanError
from toolkit.plan.hardware.catalogue import GPUS, accelerator


def test_peaks_are_dense() -> None:
    # The data sheets of Hopper and Blackwell print twice these numbers, "with sparsity".
    assert accelerator("h100-80gb").bf16 == pytest.approx(989.5e12)
    assert accelerator("h200").fp8 == pytest.approx(1979e12)
    assert accelerator("b200").bf16 == pytest.approx(2.25e15)
    assert accelerator("mi300x").bf16 == pytest.approx(1307.4e12)
    assert (
        accelerator("v100-32gb").peak_flops("bf16"),
        accelerator("cpu").peak_flops("fp32"),
    ) == (None, None)
    for entry in GPUS.values():
        if entry.tf32 and entry.bf16:
            assert entry.bf16 / entry.tf32 == pytest.approx(2, rel=0.03)
        if entry.fp8 and entry.bf16:
            assert entry.fp8 / entry.bf16 == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H100-80GB", "h100-80gb"), ("h100", "h100-80gb"), ("A100", "a100-80gb"),
        ("v100", "v100-32gb"),
    ],
)  # fmt: skip
def test_a_product_is_its_usual_memory_in_any_case(name: str, found: str) -> None:
    assert accelerator(name) is accelerator(found)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("v100-16gb", "v100-32gb"), ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("H100 PCIe", "h100-80gb-pcie"), ("h100_80gb", "h100-80gb"),
    ],
)  # fmt: skip
def test_another_name_is_an_error_with_the_nearest_one(name: str, nearest: str) -> None:
    with pytest.raises(PlanError) as raised:
        accelerator(name)
    assert raised.value.fix.startswith(f"did you mean `{nearest}`? or describe yours")
    with pytest.raises(PlanError) as raised:
        accelerator("x" * 10_000)
    assert len(str(raised.value)) < 500
