"""What `fsdp.json` says, and that the engine does it: what is gathered, reduced and kept.

That it computes what the other engines compute is in test_parity.py.
"""

from typing import Any

import pytest
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig

from tests.engines.fsdp_worker import look
from tests.engines.parity_worker import CONFIG, Case, each_case
from tests.forked import run_ranks
from toolkit.engines.fsdp.config import render
from toolkit.layout import Layout
from toolkit.models import huggingface as hf
from toolkit.models.families import FAMILIES

LAYERS = CONFIG["num_hidden_layers"]
UNITS = LAYERS + 1
"""Decoder layers, and the rest of the model."""
MICRO_BATCHES = 4
CASES = [
    Case("fsdp", 1, stage=3),
    Case("fsdp", 1, stage=2, precision="bf16"),
    Case("fsdp", 1, stage=3, offload="cpu", recompute="full"),
]


def test_stage_precision_and_offload_are_said_in_torchs_words() -> None:
    config = render(Layout(dp=2, zero_stage=3), "bf16")
    assert config["reshard_after_forward"] is True
    assert config["mp_policy"] == {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    assert config["offload_policy"] is None
    away = Layout(dp=2, zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu")
    assert render(away, "fp32")["offload_policy"] == {"pin_memory": True}
    assert render(Layout(dp=2, zero_stage=2), "fp16")["reshard_after_forward"] is False


def test_the_words_are_those_of_the_installed_torch() -> None:
    config = render(Layout(zero_stage=3), "fp32")
    names = fully_shard.__wrapped__.__kwdefaults__  # type: ignore[attr-defined]
    assert {key for key in config if "prefetch" not in key} <= names.keys()
    MixedPrecisionPolicy(**config["mp_policy"])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_layers_are_found(family: str) -> None:
    """Without them the whole model would be gathered as one."""
    config = AutoConfig.for_model(family, num_hidden_layers=3)
    layers = hf.decoder_layers(hf.meta_model(config))
    assert len(layers) == 3


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return run_ranks(each_case, 2, look, CASES)[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_rank_ever_holds_the_whole_model(seen: dict[str, Any], case: Case) -> None:
    found = seen[case.name]
    assert found["while_built"] == {"gathered": {}, "reduced": {}}
    assert sum(found["held"]) == found["whole"]
    assert max(found["held"]) < 0.51 * found["whole"]
    assert found["sharded"] == [True, True], "after a step and after an evaluation"
    assert found["buffers"], "rotary frequencies are transformers' own"
    assert found["moments"] == ["torch.float32"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_gathered_and_reduced_in_a_step(seen: dict[str, Any], case: Case) -> None:
    """Stage 3 gathers a layer for either pass of each micro batch; stage 2 once a step."""
    computed_in = "torch.bfloat16" if case.precision == "bf16" else "torch.float32"
    gathered = UNITS if case.stage == 2 else MICRO_BATCHES * (UNITS + LAYERS)
    found = seen[case.name]
    assert found["in_step"] == {
        "gathered": {computed_in: gathered},
        "reduced": {"torch.float32": MICRO_BATCHES * UNITS},
    }
    evaluated = UNITS if case.stage == 2 else 1 + MICRO_BATCHES * LAYERS
    assert found["in_evaluation"]["gathered"] == {computed_in: evaluated}
