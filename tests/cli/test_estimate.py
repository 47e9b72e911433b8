"""`dmt estimate` as a user and as a program reads it."""

from pathlib import Path
from typing import Any

import pytest

from tests.dmt import Dmt

RECIPES = Path(__file__).parents[2] / "recipes"
LLAMA_8B = str(RECIPES / "llama/llama-3.1-8b-pretrain.yaml")
LLAMA_405B = str(RECIPES / "llama/llama-3.1-405b-pretrain.yaml")
TINY = str(RECIPES / "tiny/llama-bytes.yaml")


def test_memory_and_time_by_part(dmt: Dmt) -> None:
    fixed = ("engine=deepspeed", "model=hf", "zero.stage=2", "recompute=full")
    changes = [word for text in fixed for word in ("--set", f"parallel.{text}")]
    shown = dmt("estimate", LLAMA_8B, *changes).out
    assert shown.startswith("llama-3.1-8b-pretrain  deepspeed, hf\n  dp 256 · tp 1 · pp 1")
    assert "\n  memory per GPU  " in shown and " of 79.1 GiB: fits\n" in shown
    assert "\n    weights                14.96 GiB  █████\n" in shown
    assert "\n    allocator reserve" in shown
    assert "\n  step  " in shown and " tokens/s per GPU\n    MFU " in shown
    assert "\n    matmul " in shown


def test_what_does_not_fit_says_so(dmt: Dmt) -> None:
    """Without recompute, the first of 16 stages keeps 16 micro batches of 8 wide layers."""
    printed = dmt("estimate", LLAMA_405B, "--set", "parallel.recompute=none").out
    assert ": does not fit, pipeline stage " in printed


def test_bf16_states_is_counted_on_the_node(dmt: Dmt) -> None:
    offload = ["--set", "parallel.zero.offload_optimizer=cpu"]
    printed = dmt("estimate", LLAMA_8B, "--set", "parallel.engine=deepspeed", *offload).out
    assert "\n    host of each node: " in printed


def test_an_unmeasured_cpu_is_nominal(dmt: Dmt) -> None:
    shown = dmt("estimate", TINY).out
    assert "\n  memory per process  " in shown
    assert "CUDA" not in shown
    assert "nominal CPU speeds: `dmt doctor --calibrate`" in shown


def test_a_measured_cpu_has_its_own_speed(tmp_path: Path, dmt: Dmt) -> None:
    """Half of the speed of everything, twice the time of everything but the host's."""
    times = []
    for name, flops, memory in (("fast", 0.2, 20), ("slow", 0.1, 10)):
        file = tmp_path / f"{name}.yaml"
        speeds = f"tflops: {{fp32: {flops}}}, memory_gigabytes_per_s: {memory}"
        file.write_text(f"nodes: 1\ngpus_per_node: 2\ngpu: cpu\nmeasured: {{{speeds}}}\n")
        found = machine(dmt, TINY, "--cluster", str(file))
        assert found["basis"] == "calibrated"
        times.append(found["time_parts_s"])
    for part in ("matmul", "attention", "elementwise", "optimizer"):
        assert times[1][part] == pytest.approx(2 * times[0][part])
    assert times[1]["overhead"] == times[0]["overhead"]


def test_cluster_in_place_of_the_recipes(dmt: Dmt) -> None:
    large = machine(dmt, LLAMA_8B, "--cluster", "64x8xh100-80gb")
    small = machine(dmt, LLAMA_8B, "--cluster", "16x8xh100-80gb")
    assert large["step_time_s"] < small["step_time_s"]
    assert large["basis"] == "data sheet"


def machine(dmt: Dmt, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = dmt("estimate", *arguments, "--json").json
    return found


def test_json_adds_up(dmt: Dmt) -> None:
    found = machine(dmt, LLAMA_405B)
    memory = found["memory_gib"]
    assert found["id"] == "llama-3.1-405b-pretrain"
    assert sum(found["memory_parts_gib"].values()) == pytest.approx(memory["total"])
    states = memory["parameters"] + memory["gradients"] + memory["optimizer"]
    assert memory["model_states"] == pytest.approx(states)
    assert memory["total"] == pytest.approx(states + memory["activations"] + memory["other"])
    assert sum(found["time_parts_s"].values()) == pytest.approx(found["step_time_s"])
    assert found["unsupported"] is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "needs either a recipe or --cases with --out"),
        ((TINY, "--cases", "cases.json", "--out", "x"), "needs either a recipe or --cases"),
        (("--cases", "cases.json"), "needs either a recipe or --cases with --out"),
    ],
)
def test_mistakes_are_explained(arguments: tuple[str, ...], complaint: str, dmt: Dmt) -> None:
    error = dmt("estimate", *arguments, code=2).err
    assert complaint in error and "fix: " in error


def test_what_cannot_be_built_does_not_fit(dmt: Dmt) -> None:
    """As `dmt plan` says of it: megatron-core builds all of a rank before DeepSpeed shards."""
    sets = ["engine=deepspeed", "model=megatron", "tensor=1", "zero.stage=3"]
    words = [word for one in sets for word in ("--set", f"parallel.{one}")]
    llama = str(RECIPES / "llama/llama-3.1-70b-pretrain.yaml")
    for command, code in (("estimate", 0), ("plan", 2)):
        shown = dmt(command, llama, *words, "--set", "cluster.nodes=16", code=code).out
        assert "131.4 of 79.1 GiB: does not fit" in shown
        assert "131.4 GiB while the model is built" in shown


def test_a_share_of_the_memory_is_the_limit(dmt: Dmt) -> None:
    llama = str(RECIPES / "llama/llama-3.1-8b-pretrain.yaml")
    assert "of 39.55 GiB" in dmt("estimate", llama, "--set", "cluster.memory_fraction=0.5").out
