"""Models in megatron-core on real ranks, compared with transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.forked import run_ranks


def save_random_model(config: dict[str, Any], folder: Path) -> None:
    """A model whose every tensor matters: larger weights than a fresh one, odd norms."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.normal_(mean=float(is_norm), std=0.2 if parameter.ndim == 1 else 0.1)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.normal_(std=0.1)
    model.save_pretrained(folder)


def run_cases(cases: list[dict[str, Any]], world: int) -> dict[str, dict[str, float]]:
    """The largest differences of each case, from the rank that saw them."""
    found = {}
    for rank in run_ranks(_one_rank, world, cases):
        found |= {name: result for name, result in rank.items() if result}
    return found


def _one_rank(cases: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    from tests.models.megatron_worker import run_all  # megatron-core, in the ranks alone

    return run_all(cases)


def check(found: dict[str, dict[str, float]], cases: list[dict[str, Any]]) -> None:
    assert set(found) == {case["name"] for case in cases}
    wrong = {
        name: result
        for name, result in found.items()
        if not (result["logits"] <= 1e-4 and result["losses"] <= 1e-5)
        or abs(result["read"] - 1) > 1e-5  # norms and tied embeddings are handed on
    }
    assert not wrong
    assert all(result["spread"] > 0.05 for result in found.values()), "nothing to tell apart"
