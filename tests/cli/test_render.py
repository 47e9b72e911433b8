"""`dmt render`: what the backend reads, or one clear error."""

from typing import Any

import pytest

from tests.dmt import Dmt
from tests.processes import ROOT

RECIPE = ROOT / "recipes/tiny/llama-bytes.yaml"
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("", "--to deepspeed", {"zero_optimization.stage": 2, "optimizer.params.lr": 3.0e-3}),
    ("parallel.engine=fsdp parallel.zero.stage=3", "", {"reshard_after_forward": True}),
    (
        "parallel.zero.stage=3 parallel.zero.offload_optimizer=cpu",
        "",
        {"zero_optimization.stage": 3, "zero_optimization.offload_optimizer.device": "cpu"},
    ),
    (
        "parallel.engine=megatron",
        "",
        {"transformer.num_query_groups": 2, "optimizer.lr": 3.0e-3},
    ),
    # A model of megatron-core under DeepSpeed has both.
    ("parallel.model=megatron", "--to megatron", {"gpt.vocab_size": 320, "ddp": None}),
    ("parallel.model=megatron", "", {"zero_optimization.stage": 2}),
]


def words(settings: str) -> list[str]:
    return [word for one in settings.split() for word in ("--set", one)]


@pytest.mark.parametrize(("settings", "to", "expected"), CASES)
def test_what_an_engine_reads(
    settings: str, to: str, expected: dict[str, Any], dmt: Dmt
) -> None:
    config = dmt("render", RECIPE, *to.split(), *words(settings)).json
    for key, value in expected.items():
        found = config
        for name in key.split("."):
            found = found.get(name)
        assert found == value, key


@pytest.mark.parametrize(
    ("engine", "to", "fix"),
    [
        ("ddp", "", "reads no ddp configuration"),
        ("ddp", "deepspeed", "--set parallel.engine=deepspeed"),
        ("fsdp", "deepspeed", "engine fsdp, which reads no deepspeed config"),
    ],
)
def test_engines_read_no_other_configuration(engine: str, to: str, fix: str, dmt: Dmt) -> None:
    asked = ["--to", to] if to else []
    settings = words(f"parallel.engine={engine} parallel.zero.stage=auto")
    assert fix in dmt("render", RECIPE, *asked, *settings, code=2).err
