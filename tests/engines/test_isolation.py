"""Documents of one row are as if each were alone. Every engine that is built for such data
looks by itself whether one sees another."""

from typing import Any

import pytest

from tests.engines.isolation_worker import RECURRENT, context_refusals, refusal, train
from tests.engines.pairs import BASE, DENSE
from tests.engines.parity_worker import LENGTH, Case
from tests.forked import call_ranks, run_ranks
from tests.models.small import FAMILIES
from toolkit.engines.distributed import join, leave
from toolkit.models.families import attention, unsupported
from toolkit.recipe.schema import Recipe
from toolkit.rehearse.comparison import TOLERANCE, Record, compare
from toolkit.rehearse.reference import plain_run

WINDOWED = DENSE | {
    "model_type": "mistral", "sliding_window": 3, "tie_word_embeddings": False,
}  # fmt: skip
"""Shorter than most documents."""
SOME_WINDOWED = DENSE | {
    "model_type": "qwen2", "sliding_window": 3, "use_sliding_window": True,
    "max_window_layers": 1, "num_hidden_layers": 2, "tie_word_embeddings": False,
}  # fmt: skip


def packed(
    config: dict[str, Any], world: int = 2, attention: str = "auto", **parallel: Any
) -> Recipe:
    """A recipe with one to four documents in a row."""
    return Recipe.model_validate(
        BASE
        | {
            "model": {"config": config},
            "data": BASE["data"] | {"isolate_documents": True},
            "training": BASE["training"] | {"steps": 3},
            "kernels": {"attention": attention},
            "parallel": parallel,
            "cluster": {"gpus_per_node": world, "gpu": "cpu"},
        }
    )


CASES = [
    packed(WINDOWED, engine="megatron", context=2, recompute="full"),
    packed(SOME_WINDOWED, engine="megatron", tensor=2, recompute="selective"),
    # A recomputed layer needs the documents of its own batch: the next one has come before.
    packed(WINDOWED, attention="sdpa", engine="megatron", pipeline=2, recompute="full"),
    packed(SOME_WINDOWED, attention="sdpa", engine="fsdp", zero={"stage": 3}, recompute="full"),
]
"""Windows in split rows and layers; other models in every layout are in test_pairs.py."""


def _of_family(model_type: str) -> list[Recipe]:
    """The family on transformers, and on megatron-core where that can compute it."""
    config = {"model_type": model_type, **FAMILIES[model_type]}
    if model_type in ("gemma2", "gpt_oss", "mistral"):
        config["sliding_window"] = 3
    if model_type in ("qwen2", "qwen2_moe"):  # transformers' qwen2_moe has it in its mask only
        config |= {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}
    if model_type == "llama4_text":  # queries grow with their place in the row
        config["floor_scale"] = LENGTH + 1
    engines = ["ddp", *([] if unsupported(config) else ["megatron"])]
    if model_type == "gpt_oss":  # transformers' own is refused, see below
        # All experts: two of equal score would be chosen by the last digit.
        config["num_experts_per_tok"] = config["num_local_experts"]
        engines = ["megatron"]
    kernels = ["auto"]
    if attention(config) == "sdpa" and "attention_chunk_size" not in config:
        kernels.append("sdpa")
    return [
        packed(config, 1, kernel, engine=engine) for kernel in kernels for engine in engines
    ]


def assert_equal_to_documents_alone(recipes: list[Recipe], world: int) -> None:
    """To transformers, each document in a forward pass of its own."""
    records = call_ranks(train, world, recipes)[0]
    for recipe, record in zip(recipes, records, strict=True):
        assert recipe.model.config is not None
        losses, norms = zip(*plain_run(packed(recipe.model.config, engine="ddp")), strict=True)
        found = compare(record, Record(losses, norms), TOLERANCE)
        assert found.verdict in ("exact", "within"), (recipe.model.config, found.first)


@pytest.mark.slow
def test_documents_of_a_row_are_apart() -> None:
    assert_equal_to_documents_alone(CASES, world=2)


@pytest.mark.slow
def test_every_family() -> None:
    recipes = [recipe for family in FAMILIES for recipe in _of_family(family)]
    assert_equal_to_documents_alone(recipes, world=1)


def test_masks_without_positions_are_refused() -> None:
    """transformers' gpt_oss makes its masks of the past alone."""
    config = FAMILIES["gpt_oss"] | {"model_type": "gpt_oss"}
    with pytest.raises(AssertionError, match="type gpt_oss does not isolate the documents"):
        call_ranks(train, 1, [packed(config, 1, engine="ddp")])


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
