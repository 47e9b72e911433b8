"""`benchmarks/published.py`: what sources print, and what the fields of their cases mean."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from published import predict

from tests.processes import ROOT

LLAMA_8B = {
    "name": "Llama-3-8B", "layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32,
    "kv_heads": 8, "vocab": 128256, "seq": 8192, "mlp": "swiglu",
}  # fmt: skip
GPT_7B = {
    "name": "gpt", "layers": 32, "hidden": 4096, "ffn": 16384, "heads": 32, "kv_heads": 8,
    "vocab": 131073, "seq": 8192, "untied": True, "mlp": "gelu",
}  # fmt: skip


def case(model: dict[str, Any], gpu: str, gpus: int, **fields: Any) -> dict[str, Any]:
    """A case of a file; `layout` and `batch` as they are stated."""
    hardware = {"gpu": gpu, "n_gpus": gpus}
    defaults = {"id": "one", "layout": {}, "batch": {}, "precision": "bf16", "notes": ""}
    return defaults | {"model": model, "hardware": hardware} | fields


def test_cases_become_results(tmp_path: Path) -> None:
    cases, out = tmp_path / "cases.json", tmp_path / "results.json"
    unknown = case({"params": 7.5e9}, "A100", 8) | {"id": "unknown"}
    cases.write_text(json.dumps([case(LLAMA_8B, "H100", 8), unknown]))
    command = [sys.executable, "benchmarks/published.py", str(cases), "--out", str(out)]
    subprocess.run(command, check=True, cwd=ROOT)
    known, unknown = json.loads(out.read_text())
    assert known["unsupported"] is None and known["step_time_s"] > 0
    assert unknown["unsupported"] and unknown["memory_gib"] == {}
    fields = {"id", "step_time_s", "tokens_per_s_per_gpu", "mfu", "memory_gib", "fits"}
    assert set(known) == set(unknown) == fields | {"unsupported"}
    parts = {"parameters", "gradients", "optimizer", "model_states", "activations", "other"}
    assert set(known["memory_gib"]) == parts | {"total"}


@pytest.mark.parametrize(
    ("gpus", "mode", "reserved_gib"),
    [
        # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: peak
        # reserved memory of FSDP2 with selective recompute per operator, local batch 2.
        (8, "eager", 82.4),
        (8, "compile", 77.0),
        (128, "eager", 67.0),
        (128, "compile", 62.0),
    ],
)
def test_reserved_memory_of_torchtitan(gpus: int, mode: str, reserved_gib: float) -> None:
    layout = {"dp": gpus, "zero_stage": 3, "recompute": "selective(op)"}
    batch = {"micro": 2, "global": 2 * gpus}
    asked = case(LLAMA_8B, "H100-96GB", gpus, layout=layout, batch=batch, notes=mode)
    result = predict(asked)
    assert result["memory_gib"]["total"] == pytest.approx(reserved_gib, rel=0.08)
    assert result["fits"] is True


def test_allocated_memory_of_megatrons_last_rank() -> None:
    """Megatron-LM's functional test gpt3_7b_tp1_pp4_memory_speed, golden values of DGX H100:
    56.55 GiB at most allocated on the last rank, with 8 chunks of one layer per rank."""
    layout = {"dp": 2, "tp": 1, "pp": 4, "vpp": 8, "zero_stage": 1, "recompute": "none"}
    batch = {"micro": 1, "global": 8}
    result = predict(case(GPT_7B, "H100-80GB", 8, layout=layout, batch=batch))
    assert result["memory_gib"]["total"] == pytest.approx(56.55, rel=0.08)
    assert result["tokens_per_s_per_gpu"] == pytest.approx(8192 / result["step_time_s"])


def test_what_ran_out_of_memory_does_not_fit() -> None:
    """torchtitan, docs/performance.md (2024): Llama 2 70B on 64 A100, selective recompute
    per operator; local batch 1 ran, 2 ran out of memory, and ran with full recompute."""
    model = {
        "name": "Llama-2-70B", "layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64,
        "kv_heads": 8, "vocab": 32000, "seq": 4096, "mlp": "swiglu",
    }  # fmt: skip

    def fits(micro: int, recompute: str) -> Any:
        layout = {"dp": 64, "zero_stage": 3, "recompute": recompute}
        batch = {"micro": micro, "global": 64 * micro}
        return predict(case(model, "A100-80GB", 64, layout=layout, batch=batch))["fits"]

    assert fits(1, "selective(op)") is True
    assert fits(2, "selective(op)") is False
    assert fits(2, "full") is True


def test_what_was_reported_is_never_read() -> None:
    asked = case(LLAMA_8B, "H100-80GB", 8, layout={"dp": 8, "zero_stage": 3}, source="a")
    reported = {"reported": {"mem_gb_per_gpu": 1}, "source": "b", "kind": "formula"}
    assert predict(asked | reported) == predict(asked)
