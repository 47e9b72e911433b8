"""`kernels.fp8`: in every layout the run of transformers with torchao in one process."""

from dataclasses import replace

import pytest
import torch
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engines.cases import TOLERANCE, Case, assert_curves, reference, run
from toolkit.errors import PlanError
from toolkit.models import huggingface as hf
from toolkit.models.fp8 import convert

STEPS = 3
"""Later, last digits that differ between layouts flip codes of 8 bits."""
CASES = [Case("ddp", 1), Case("fsdp", 2, 3), Case("deepspeed", 2, 2)]


@pytest.mark.slow
def test_every_engine() -> None:
    cases = [replace(case, steps=STEPS, kernels={"fp8": "rowwise"}) for case in CASES]
    results = run(cases, 2)
    for case in cases:
        assert_curves(results[case.name], reference(case), name=str(case))
    plain = reference(replace(cases[0], kernels={}))
    assert reference(cases[0])["loss"] != pytest.approx(plain["loss"], rel=TOLERANCE)


def test_what_is_converted() -> None:
    """Products whose sizes are multiples of 16, with the scales that are stated."""
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=32, intermediate_size=72, num_hidden_layers=4,
        num_attention_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    names = {name: id(parameter) for name, parameter in model.named_parameters()}
    convert(model, "rowwise")
    found = {
        name: part.config
        for name, part in model.named_modules()
        if isinstance(part, Float8Linear)
    }
    stated = Float8LinearConfig.from_recipe_name("rowwise")
    assert {replace(one, emulate=False) for one in found.values()} == {stated}
    assert found.keys() == {
        f"model.layers.{layer}.self_attn.{one}_proj" for layer in range(4) for one in "qkvo"
    }
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == names


def test_nothing_to_convert() -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=24, intermediate_size=72, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    with pytest.raises(PlanError, match="no product"):
        convert(hf.new_model(config, torch.float32), "rowwise")
