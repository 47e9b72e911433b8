"""`kernels.fused` and `loss: liger`: the numbers of plain transformers, by Liger's kernels,
which Triton's interpreter computes here."""

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engines.cases import Case, alone, assert_curves, reference, train
from tests.engines.small import ACTIVATIONS, batch, saved_bytes, small_model
from tests.forked import run_ranks
from tests.models.configs import CONFIGS
from tests.triton_cpu import compile_only, interpret
from toolkit.errors import BackendUnavailable
from toolkit.layout import Layout
from toolkit.models import huggingface as hf
from toolkit.models import liger
from toolkit.models.adapters.huggingface import inject
from toolkit.models.adapters.lora import lora_of
from toolkit.models.families import model_spec
from toolkit.plan.cost.layer import layer_activations
from toolkit.plan.cost.workload import Workload
from toolkit.plan.rules.kernels import LIGER_FAMILIES
from toolkit.recipe.schema import AdapterSection

STEPS = 2
ONE = {"num_hidden_layers": 1}
SHARDED = [
    Case("deepspeed", 2, 3, family=ONE),
    Case("fsdp", 2, 3, recompute="full", family=ONE),
]


def interpreted(cases: list[Case]) -> dict[str, Any]:
    """The main program of a rank."""
    interpret()
    return alone(train, cases)


@pytest.mark.slow
def test_sharded_weights() -> None:
    kernels = {"fused": "liger", "loss": "liger"}
    how: dict[str, Any] = {"kernels": kernels, "gpu": "h100-80gb"}
    fused = [replace(one, steps=STEPS, **how) for one in SHARDED]
    for name, result in run_ranks(interpreted, 2, fused)[0].items():
        assert_curves(result, reference(fused[0]), name=name)


LAYERS = 2
ADAPTED = "llama with adapters"
OTHER_LOSS = "gemma2", "granite"
"""Models that change logits before the loss."""


def compared(names: list[str]) -> dict[str, tuple[float, Counter[str]]]:
    """For each model: the largest error of a gradient, relative to the largest gradient of the
    parameter, and Liger's functions in the graph."""
    interpret()
    return {name: errors_of(name) for name in names}


def errors_of(name: str) -> tuple[float, Counter[str]]:
    plain, model = made(name), made(name)
    expected = hf.log_probs(plain, batch(1, 4))
    weights = torch.linspace(0, 1, expected.numel()).view_as(expected)
    torch.autograd.backward((weights * expected).sum())
    hf.chunk_loss(model, "whole" if name in OTHER_LOSS else "liger")
    liger.fuse(model, "liger")
    assert [*map(type, made(name).modules())] == [*map(type, plain.modules())]
    found = hf.log_probs(model, batch(1, 4))
    used = Counter(node for node in graph(found) if node.startswith("Liger"))
    torch.autograd.backward((weights * found).sum())
    pairs = [(found.detach(), expected.detach())]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        pairs += [(one.grad, other.grad)] if one.grad is not None else []
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs), used


def made(name: str) -> nn.Module:
    if name != ADAPTED:
        return small_model(name, num_hidden_layers=LAYERS).train()
    model = small_model("llama", num_hidden_layers=LAYERS).train()
    section = AdapterSection(rank=2, alpha=4, targets="all-linear")
    torch.manual_seed(0)
    inject(model, lora_of(section, model.config.to_dict()))
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in parameter_name)
        if "lora" in parameter_name:
            nn.init.normal_(parameter, std=0.1)
    return model


def graph(tensor: Tensor) -> list[str]:
    """The functions that made a tensor."""
    seen: set[Any] = set()
    left = [tensor.grad_fn]
    while left:
        if (node := left.pop()) is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return [node.name() for node in seen]


LOSS = "LigerFusedLinearCrossEntropyFunctionBackward"


@pytest.mark.slow
def test_families() -> None:
    """Every norm is Liger's, and so are rotary positions, losses and, without experts, MLPs."""
    results = run_ranks(compared, 1, [*LIGER_FAMILIES, ADAPTED])[0]
    for name, (error, used) in results.items():
        assert error < 5e-6, name
        plain = small_model(name.split()[0], num_hidden_layers=LAYERS)
        norms = sum("Norm" in type(one).__name__ for one in plain.modules())
        mlp = "GELU" if name.startswith("gemma") else "SiLU"
        rotates = getattr(plain.config, "no_rope_layers", None)
        experts = model_spec(plain.config.to_dict()).moe_layers
        assert used == Counter(
            LigerRMSNormFunctionBackward=norms - (name == ADAPTED),  # the first trains nothing
            LigerRopeFunctionBackward=sum(rotates) if rotates else LAYERS,
            **({} if name in OTHER_LOSS else {LOSS: 1}),
            **({} if experts else {f"Liger{mlp}MulFunctionBackward": LAYERS}),
        ), name


def compiled_for_hopper() -> tuple[dict[str, tuple[bytes, str]], float]:
    """Of each kernel, the first bytes of its machine code and its assembly; and the bytes that
    a layer keeps."""
    kernels = compile_only()
    three, one = (saved_bytes(layers, "none", "none", "liger") for layers in (3, 1))
    for name in ("llama", "gemma2"):
        model = small_model(name, num_hidden_layers=1).to(torch.bfloat16).train()
        hf.chunk_loss(model, "whole" if name in OTHER_LOSS else "liger")
        liger.fuse(model, "liger")
        torch.autograd.backward(hf.log_probs(model, batch(1, 4)).sum())
    found = {name: (code["cubin"][:4], code["ptx"]) for name, code in kernels.items()}
    return found, (three - one) / 2


@pytest.mark.slow
def test_machine_code_and_memory() -> None:
    """Each kernel compiles for an H100; a layer keeps what the planner says."""
    kernels, kept = run_ranks(compiled_for_hopper, 1)[0]
    assert {name.strip("_").removeprefix("triton_") for name in kernels} == {
        "rope",
        "liger_cross_entropy_kernel",
        *(f"{what}_{way}_kernel" for what in PARTS for way in ("forward", "backward")),
    }
    for start, assembly in kernels.values():
        assert start == b"\x7fELF" and ".target sm_90" in assembly
    spec = model_spec({"model_type": "llama", **CONFIGS["llama"], **ACTIVATIONS})
    workload = Workload(
        spec, 512, "bf16", "ddp", fused_elementwise=False, fused_norms=True, fused_glu=True
    )
    planned = layer_activations(workload, Layout()).total
    assert kept == pytest.approx(planned, rel=0.02)


PARTS = "rms_norm", "swiglu", "geglu_tanh"


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(BackendUnavailable, match="liger-kernel cannot be imported") as caught:
        liger.fuse(nn.Linear(1, 1), "liger")
    assert "pip install 'liger-kernel" in (caught.value.fix or "")
    with pytest.raises(BackendUnavailable, match=r"kernels\.loss: liger-kernel cannot"):
        liger.fused_loss(small_model("llama", num_hidden_layers=1))
