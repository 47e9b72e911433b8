"""What `model.balance` logs, by hand from transformers' routers. That every layout trains with
it as transformers would is in test_pairs.py."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributions import Categorical

from tests.engines.cases import (
    BIAS,
    GLM,
    LENGTH,
    MIXTRAL,
    TOLERANCE,
    VOCABULARY,
    Case,
    global_batches,
    megatron,
    plain_model,
    run,
)
from tests.models.configs import SMALL
from toolkit.models.routers import is_router, outcome
from toolkit.models.types import SCORES
from toolkit.recipe.schema import BalanceSection
from toolkit.rehearse.losses import balance_terms, tokens_of

SEQUENCE_LOSS = {"kind": "sequence_loss", "coefficient": 0.05, "z_loss": 0.02}
LLAMA4 = SMALL | {
    "model_type": "llama4_text", "vocab_size": VOCABULARY, "num_local_experts": 4,
    "head_dim": 16, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2,
}  # fmt: skip
"""Sigmoid scores without biases, of which none is more than the experts' own weight."""


def balanced(case: Case, **more: Any) -> Case:
    return replace(case, steps=1, balance=BIAS if case.family == GLM else SEQUENCE_LOSS, **more)


CASES = {
    1: [
        balanced(Case("ddp", 8, recompute="full", family=MIXTRAL)),
        balanced(Case("ddp", 4, family=GLM)),
        balanced(Case("ddp", 4, family=LLAMA4)),
    ],
    2: [
        balanced(Case("fsdp", 1, family=MIXTRAL)),
        balanced(Case("deepspeed", 2, 1, recompute="full", family=MIXTRAL)),
        balanced(Case("deepspeed", 2, 3, recompute="full", family=GLM)),
        balanced(megatron(pipeline=2, micro_batch=1, recompute="full", family=MIXTRAL)),
        balanced(megatron(expert=2, family=GLM)),
        balanced(megatron(context=2, expert=2, family=MIXTRAL)),
    ],
}
"""One of each way to score; tests/models/test_routers.py has every type."""


@cache
def first_step(model_type: str) -> dict[str, float]:
    """What is logged of the first global batch, without what follows each row's last trained
    label."""
    case = next(one for one in CASES[1] if one.family["model_type"] == model_type)
    settings, model = BalanceSection.model_validate(case.balance), plain_model(case)
    seen: list[tuple[torch.Tensor, ...]] = []
    for router in filter(is_router, model.modules()):
        router.register_forward_hook(lambda made, _, out: seen.append(outcome(made, out)))
    (batch,) = global_batches(1)
    with torch.no_grad():
        model(batch.input_ids, use_cache=False)
    real = torch.cat([torch.arange(LENGTH) < tokens_of(row) for row in batch.labels])
    sigmoid, terms, entropies, busiest = SCORES[model_type] == "sigmoid", [], [], []
    for logits, _, indices in seen:
        for off in ("z_loss", "coefficient"):
            one = settings.model_copy(update={off: 0.0})
            terms.append(balance_terms(one, sigmoid, logits, indices, batch.labels).item())
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        entropies.append(Categorical(probs=scores[real]).entropy().mean().item())
        counts = indices[real].flatten().bincount(minlength=logits.shape[-1]).double()
        busiest.append((counts.max() / counts.mean()).item())
    return {
        "balance_loss": sum(terms[::2]),
        "router_z_loss": sum(terms[1::2]),
        "busiest_expert": max(busiest),
        "router_entropy": sum(entropies) / len(entropies),
        "dropped_tokens": 0.0,
    }


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_logged(world: int) -> None:
    results = run(CASES[world], world)
    for case in CASES[world]:
        (logged,) = results[case.name]["metrics"]
        expected = first_step(case.family["model_type"])
        assert logged == pytest.approx(expected, rel=TOLERANCE), case
