"""`fp8`: in every layout the run of transformers with torchao in one process."""

from dataclasses import replace

import pytest
import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engines.cases import TOLERANCE, assert_curves, run
from tests.engines.parity_worker import Case, plain_loop, reference_model
from toolkit.errors import PlanError
from toolkit.features.fp8 import Fp8Section, LayersInBf16
from toolkit.features.fp8.products import convert
from toolkit.models import huggingface as hf

STEPS = 3
"""Later, last digits that differ between layouts flip codes of 8 bits."""
CASES = [Case("ddp", 1), Case("fsdp", 2, 3), Case("deepspeed", 2, 2)]
SELDOM = [
    Case("ddp", 2, recompute="full"),
    Case("fsdp", 2, 2),
    *(Case("deepspeed", 2, stage) for stage in (0, 1)),
]


def reference(recipe: str, layers: tuple[int, ...]) -> dict[str, list[float]]:
    """torchao in a plain loop; the products of `layers` are in 8 bits."""
    model, optimizer = reference_model(Case("ddp", 1))
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    chosen = tuple(f"model.layers.{layer}." for layer in layers)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name.startswith(chosen)
    )
    return plain_loop(model, optimizer, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layouts"),
    [
        ("rowwise", CASES),
        pytest.param("rowwise", SELDOM, marks=pytest.mark.soak),
        pytest.param("rowwise_with_gw_hp", CASES, marks=pytest.mark.soak),
    ],
    ids=["rowwise", "rowwise, seldom", "weights' gradients in 16 bits"],
)
def test_every_layout(recipe: str, layouts: list[Case]) -> None:
    cases = [replace(case, steps=STEPS, fp8={"recipe": recipe}) for case in layouts]
    kept = {"recipe": recipe, "layers_in_bf16": {"last": 1}}
    cases.append(replace(cases[0], fp8=kept))
    cases.append(replace(cases[1], kernels={"compile": "layers"}))
    results = run(cases, 2)
    for case in cases:
        expected = reference(recipe, (0,) if case.fp8 == kept else (0, 1))
        assert_curves(results[case.name], expected, name=case.name)
    plain = plain_loop(*reference_model(Case("ddp", 1)), STEPS)
    assert reference(recipe, (0, 1))["loss"] != pytest.approx(plain["loss"], rel=TOLERANCE)


def test_what_is_converted() -> None:
    """Products of the layers between, with sizes that are multiples of 16."""
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=32, intermediate_size=72, num_hidden_layers=4,
        num_attention_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    names = {name: id(parameter) for name, parameter in model.named_parameters()}
    convert(model, Fp8Section(layers_in_bf16=LayersInBf16(first=1, last=2)))
    found = {name for name, part in model.named_modules() if isinstance(part, Float8Linear)}
    assert found == {f"model.layers.1.self_attn.{one}_proj" for one in "qkvo"}
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == names


def test_nothing_to_convert() -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=24, intermediate_size=72, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    with pytest.raises(PlanError, match="no product"):
        convert(hf.new_model(config, torch.float32), Fp8Section())
