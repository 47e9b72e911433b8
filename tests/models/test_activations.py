"""Layer inputs in host memory and MLPs in chunks: the same gradients, and what is kept."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.engines.pairs import STEPS, Case, record
from tests.engines.small import ACTIVATIONS, batch, saved_bytes, small_model
from tests.forked import call_ranks
from tests.models.configs import CONFIGS
from toolkit.engines.distributed import Ranks
from toolkit.errors import PlanError
from toolkit.layout import Recompute
from toolkit.models import activations
from toolkit.models import huggingface as hf
from toolkit.models.families import model_spec
from toolkit.plan.cost.layer import layer_activations
from toolkit.plan.cost.workload import Workload
from toolkit.plan.rules.kernels import TILED_FAMILIES

pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
]

SHAPE = (1, 1, False, 1)
LAYERS = 3


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = hf.log_probs(model.train(), batch())
    weights = torch.linspace(0.1, 1, found.numel()).view_as(found)
    torch.autograd.backward((found * weights).sum())
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def _eager(family: str) -> PreTrainedModel:
    """With a mask."""
    model = small_model(family)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "mixtral"])
def test_inputs_on_the_host_change_no_bit(family: str, monkeypatch: Any) -> None:
    """And nothing else goes there: gpt2's layers also take their mask by position."""
    sent: list[torch.Size] = []
    copy = activations._to_host
    monkeypatch.setattr(
        activations, "_to_host", lambda saved: (sent.append(saved.shape), copy(saved))[1]
    )
    kept = gradients(_eager(family))
    some: tuple[Recompute, ...] = ("full", 2)
    for recompute in some:
        sent.clear()
        model = _eager(family)
        hf.enable_recompute(model, recompute, inputs_on_host=True)
        found = gradients(model)
        assert kept.keys() == found.keys()
        assert all(torch.equal(kept[name], found[name]) for name in kept)
        layers = hf.decoder_layers(model)
        assert sent == [(2, 16, 64)] * (len(layers) if recompute == "full" else 2)


@pytest.mark.parametrize("family", TILED_FAMILIES)
def test_tiled_mlps_are_exact(family: str) -> None:
    whole, model = gradients(small_model(family)), small_model(family)
    hf.tile_mlps(model)
    hf.enable_recompute(model, 1)  # chunks inside of a recomputed layer, too
    found = gradients(model)
    assert whole.keys() == found.keys()
    for name, value in whole.items():
        distance = torch.linalg.vector_norm(found[name] - value)
        assert distance <= 1e-6 * torch.linalg.vector_norm(value), name


def test_what_the_device_keeps() -> None:
    """As the planner says: with their inputs on the host, recomputed layers keep nothing."""
    spec = model_spec({"model_type": "llama", **CONFIGS["llama"], **ACTIVATIONS})
    plain = Workload(spec, 512, "bf16", "ddp", fused_elementwise=False)

    def layer(recompute: Recompute, **options: bool) -> float:
        more, one = (saved_bytes(n, "none", recompute, **options) for n in (LAYERS, 1))
        return (more - one) / (LAYERS - 1)

    kept, offloaded = layer("none"), layer("full", inputs_on_host=True)
    assert offloaded == 0 < layer("full") < 0.1 * kept
    tiled = Workload(spec, 512, "bf16", "ddp", fused_elementwise=False, tiled_mlp=True)
    planned = layer_activations(tiled, *SHAPE, "none").stored.total
    assert layer("none", tiled=True) == pytest.approx(planned, rel=0.02)
    assert planned < 0.6 * layer_activations(plain, *SHAPE, "none").stored.total


def test_intermediate_activations_are_of_a_chunk(monkeypatch: Any) -> None:
    monkeypatch.setattr("toolkit.layout._CHUNK_HIDDEN", 8 * 64)
    sizes: list[int] = []
    mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    mlp[1].register_forward_hook(lambda _, __, output: sizes.append(output.shape[1]))
    activations.tile(mlp, positions=1)
    hidden = torch.randn(1, 32, 64, requires_grad=True)
    mlp(hidden).sum().backward()
    assert sizes == [8] * 8  # four chunks, and again in the backward pass


def test_a_layer_that_takes_its_input_by_name() -> None:
    with pytest.raises(PlanError, match="take their input by name"):
        activations.with_inputs_on_host(lambda _: None)(None)


def copies(ranks: Ranks, case: Case) -> int:
    """Worker: how often a run copies a layer's input to the host."""
    count, copy = 0, activations._to_host

    def counted(saved: Tensor) -> activations.Packed:
        nonlocal count
        count += 1
        return copy(saved)

    with patch.object(activations, "_to_host", counted):
        record(case, ranks)
    return count


def test_the_recomputed_layers_of_megatron_core() -> None:
    """Each input of them once, whatever else its blocks save."""
    case, micro_batches = Case("megatron-pp2", (("recompute", "one layer"),)), 4
    assert call_ranks(copies, case.world, case) == [micro_batches * STEPS] * 2
