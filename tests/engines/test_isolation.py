"""Documents of one row are as if each were alone. Every engine that is built for such data
looks by itself whether one sees another."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.engines.cases import assert_curves, megatron
from tests.engines.isolation_worker import (
    RECURRENT,
    context_refusals,
    refusal,
    separate_documents,
    train,
)
from tests.engines.parity_worker import LENGTH, VOCABULARY, Case, each_case
from tests.forked import call_ranks, run_ranks
from tests.models.small import FAMILIES
from toolkit.engines.distributed import join, leave
from toolkit.models.families import attention, unsupported

WINDOWED = {"model_type": "mistral", "sliding_window": 3, "tie_word_embeddings": False}
"""Shorter than most documents."""
SOME_WINDOWED = {
    "model_type": "qwen2", "sliding_window": 3, "use_sliding_window": True,
    "max_window_layers": 1, "num_hidden_layers": 2,
}  # fmt: skip
CASES = [
    megatron(context=2, recompute="full", family=WINDOWED),
    megatron(tensor=2, recompute="selective", family=SOME_WINDOWED),
    # A recomputed layer needs the documents of its own batch: the next one has come before.
    replace(
        megatron(pipeline=2, recompute="full", family=WINDOWED),
        kernels={"attention": "sdpa"},
    ),
    replace(
        Case("fsdp", 2, stage=3, family=SOME_WINDOWED, recompute="full"),
        kernels={"attention": "sdpa"},
    ),
]
"""Windows in split rows and layers; other models in every layout are in test_pairs.py."""


def _of_family(model_type: str) -> list[Case]:
    """The family on transformers, and on megatron-core where that can compute it."""
    config = {"model_type": model_type, **FAMILIES[model_type]}
    config["vocab_size"] = VOCABULARY
    if model_type in ("gemma2", "gpt_oss", "mistral"):
        config["sliding_window"] = 3
    if model_type in ("qwen2", "qwen2_moe"):  # transformers' qwen2_moe has it in its mask only
        config |= {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}
    if model_type == "llama4_text":  # queries grow with their place in the row
        config["floor_scale"] = LENGTH + 1
    plain = Case("ddp", 2, family=config)
    if model_type == "gpt_oss":  # transformers' own is refused, see below
        # All experts: two of equal score would be chosen by the last digit.
        every = config | {"num_experts_per_tok": config["num_local_experts"]}
        return [replace(plain, engine="megatron", family=every)]
    cases = [plain] if unsupported(config) else [plain, replace(plain, engine="megatron")]
    if attention(config) == "sdpa" and "attention_chunk_size" not in config:
        cases += [replace(case, kernels={"attention": "sdpa"}) for case in cases]
    return cases


@cache
def _reference(family: tuple[tuple[str, Any], ...]) -> dict[str, list[float]]:
    return separate_documents(dict(family))


def assert_isolated(cases: list[Case], world: int) -> None:
    cases = [replace(case, isolated=True) for case in cases]
    results = call_ranks(each_case, world, train, cases)[0]
    for case in cases:
        print(case.name)
        found = results[case.name]
        assert found["leaks"] == [False, True], "none to the bit, where some can be seen"
        assert_curves(found, _reference(tuple(case.family.items())))


@pytest.mark.slow
def test_documents_of_a_row_are_apart() -> None:
    assert_isolated(CASES, world=2)


@pytest.mark.slow
def test_every_family() -> None:
    assert_isolated([case for family in FAMILIES for case in _of_family(family)], world=1)


def test_masks_without_positions_are_refused() -> None:
    """transformers' gpt_oss makes its masks of the past alone."""
    config = FAMILIES["gpt_oss"] | {"model_type": "gpt_oss", "vocab_size": VOCABULARY}
    with pytest.raises(AssertionError, match="type gpt_oss does not isolate the documents"):
        assert_isolated([Case("ddp", 2, family=config)], world=1)


def _refusals() -> dict[str, str]:
    ranks = join()
    case = Case("ddp", 2, isolated=True)
    found = {model_type: refusal(model_type, ranks, case) for model_type in RECURRENT}
    leave()
    return found


def test_models_whose_state_runs_along_the_row_are_refused() -> None:
    for model_type, why in run_ranks(_refusals, 1)[0].items():
        assert f"the model type {model_type} does not isolate the documents" in why
        assert "data.isolate_documents to false" in why


def test_models_that_lose_the_split_of_their_rows_are_refused() -> None:
    found = call_ranks(context_refusals, 2)[0]
    assert found.pop("qwen3") == "accepted"
    for model_type, why in found.items():
        assert f"{model_type} does not compute the same where context-parallel" in why
        assert "parallel.context to 1" in why
    assert "TypeError" in found["bloom"], "it adds the mask to its scores"
