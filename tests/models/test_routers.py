"""Which routers DMT knows, and that they score and choose as it says."""

from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.models.small import tiny
from toolkit.models.routers import is_router, outcome
from toolkit.models.types import BIASED, SCORES

ONE_SPARSE: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"first_k_dense_replace": 1},
    "glm_moe_dsa": {"mlp_layer_types": ["dense", "sparse"]},
}
"""Types whose first layers are dense, more of them than the small model has."""


def small_model(model_type: str) -> torch.nn.Module:
    """A model on the CPU, one of whose layers at least has experts."""
    built = AutoConfig.for_model(**tiny(model_type) | ONE_SPARSE.get(model_type, {}))
    built._experts_implementation = "eager"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(built)


@pytest.mark.parametrize("model_type", SCORES)
def test_scores(model_type: str) -> None:
    """The weights of the chosen experts are in the proportion of their scores, and these are
    the largest."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    model = small_model(model_type)
    found: list[tuple[torch.Tensor, ...]] = []
    for router in filter(is_router, model.modules()):
        torch.nn.init.normal_(router.weight, std=0.3)
        router.register_forward_hook(lambda m, _given, output: found.append(outcome(m, output)))
        has_bias = isinstance(getattr(router, "e_score_correction_bias", None), torch.Tensor)
        assert has_bias == (model_type in BIASED)
    with torch.no_grad():
        model(torch.arange(3, 35).view(2, 16), use_cache=False)
    assert found
    for logits, weights, indices in found:
        assert logits.shape == (32, 4)
        scores = logits.softmax(-1) if SCORES[model_type] == "softmax" else logits.sigmoid()
        mine = scores.gather(1, indices)
        if weights.shape == logits.shape:  # those of all experts
            assert torch.equal(weights, torch.zeros_like(weights).scatter(1, indices, mine))
            weights = mine
        torch.testing.assert_close(
            weights / weights.sum(1, keepdim=True), mine / mine.sum(1, keepdim=True)
        )
        assert torch.equal(mine.amin(1), scores.topk(indices.shape[1]).values[:, -1])
