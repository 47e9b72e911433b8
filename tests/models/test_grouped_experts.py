"""megatron-core's experts as grouped products: equal to those computed in turn."""

from typing import Any

import pytest
import torch

from tests.forked import run_ranks
from tests.models.configs import config_of
from toolkit.layout import Layout
from toolkit.models.families import megatron_model

EXPERTS, TOKENS = 6, 40
COUNTS = {
    "some without tokens": [11, 0, 9, 20, 0, 0],
    "one with all": [0, TOKENS, 0, 0, 0, 0],
    "none": [0] * EXPERTS,
}


def compared(precision: str, frozen: bool) -> dict[str, float]:
    """By what the experts get: the largest difference, relative to the largest element, of
    outputs and of the gradients of tokens, probabilities and every weight."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    from toolkit.engines.distributed import join, leave
    from toolkit.models.megatron import cpu
    from toolkit.models.megatron import model as megatron
    from toolkit.models.megatron.config import gpt_arguments, transformer_arguments

    join()
    cpu.redirect()
    megatron.join_groups(Layout(), seed=1)
    layout = Layout(experts="grouped")
    described = megatron_model(config_of("qwen3_moe", num_experts=EXPERTS))
    (chunk,) = megatron.build_chunks(
        described,
        transformer_arguments(described, layout, precision),
        gpt_arguments(described, layout),
        layout,
    )
    grouped = chunk.decoder.layers[0].mlp.experts
    for parameter in grouped.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
        parameter.requires_grad_(not frozen)
    dtype = next(grouped.parameters()).dtype

    def results(forward: Any, counts: list[int]) -> list[torch.Tensor]:
        torch.manual_seed(sum(counts))
        hidden = grouped.config.hidden_size
        tokens = torch.randn(sum(counts), hidden, dtype=dtype, requires_grad=True)
        probs = torch.rand(sum(counts), requires_grad=True)
        grouped.zero_grad(set_to_none=True)
        output, bias = forward(grouped, tokens, torch.tensor(counts), probs)
        assert bias is None
        output.backward(torch.randn_like(output))
        inputs = [tokens, probs, *([] if frozen else grouped.parameters())]
        assert all(one.grad is not None for one in inputs), "every weight has a gradient"
        return [output.detach(), *(one.grad for one in inputs)]

    assert type(grouped) is not SequentialMLP
    found = {}
    for name, counts in COUNTS.items():
        pairs = zip(
            results(type(grouped).forward, counts),
            results(SequentialMLP.forward, counts),
            strict=True,
        )
        found[name] = (
            max(
                float((one - other).abs().amax() / other.abs().amax().clamp(min=1e-30))
                for one, other in pairs
                if one.numel()
            )
            if any(counts)
            else 0.0
        )
    megatron.leave_groups()
    leave()
    return found


@pytest.mark.parametrize(
    ("precision", "frozen"), [("fp32", False), ("bf16", False), ("fp32", True)]
)
def test_what_experts_compute_in_turn(precision: str, frozen: bool) -> None:
    """On a CPU the products of both are the same ones, to the bit; 1e-6 leaves room."""
    (found,) = run_ranks(compared, 1, precision, frozen)
    assert found.keys() == COUNTS.keys()
    assert max(found.values()) < (1e-6 if precision == "fp32" else 1e-2), found
