"""Bytes per rank, counted by hand: ZeRO's figure 1 and megatron-core's guide."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.models.families import model_spec
from toolkit.models.spec import ModelSpec
from toolkit.plan.layout import Layout
from toolkit.plan.legality import TABLE, Pair
from toolkit.plan.states import GIB, ModelStates

SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
UNTIED = model_spec(SHAPE | {"tie_word_embeddings": False})
TIED = model_spec(SHAPE | {"tie_word_embeddings": True})
EXPERTS = {"model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 4}
MIXTRAL = model_spec(SHAPE | EXPERTS)
MEGATRON, ZERO_MEGATRON = Pair("megatron", "megatron"), Pair("deepspeed", "megatron")
EMBEDDING = 512 * 64
ATTENTION, MLP, NORMS = 4 * 64 * 64, 3 * 64 * 128, 2 * 64


def per_byte(spec: ModelSpec, layout: Layout, precision: str = "fp32") -> float:
    """Parameters on the fullest rank, from what 16 bytes each would take."""
    return ModelStates(spec, precision, MEGATRON).gib(layout) * GIB / 16


@pytest.mark.parametrize(
    ("engine", "model", "precision", "bytes_of_stages"),
    [
        ("deepspeed", "hf", "bf16", [16, 7, 5.5, 4]),
        ("deepspeed", "hf", "fp32", [16, 10, 7, 4]),
        ("megatron", "megatron", "bf16", [18, 9]),  # 6 + 12/d
        ("megatron", "megatron", "fp32", [16, 10]),
    ],
)
def test_bytes_per_parameter_on_four_ranks(
    engine: Any, model: Any, precision: str, bytes_of_stages: list[float]
) -> None:
    states = ModelStates(UNTIED, precision, Pair(engine, model))
    stages = range(len(bytes_of_stages))
    found = [states.gib(Layout(dp=4, zero_stage=stage)) for stage in stages]  # type: ignore[arg-type]
    total = UNTIED.parameters.total
    assert found == pytest.approx([each * total / GIB for each in bytes_of_stages])


def test_tensor_parallel_splits_all_but_norms() -> None:
    split = 2 * EMBEDDING + 6 * (ATTENTION + MLP)
    norms = 6 * NORMS + 64
    assert per_byte(UNTIED, Layout()) == split + norms == UNTIED.parameters.total
    assert per_byte(UNTIED, Layout(tp=2)) == split / 2 + norms


def test_the_fullest_stage_counts() -> None:
    layer = ATTENTION + MLP + NORMS + 64 / 6
    assert per_byte(UNTIED, Layout(pp=2)) == pytest.approx(3 * layer + EMBEDDING)
    # A tied head is another copy of the embedding on the last stage.
    assert per_byte(TIED, Layout(pp=2)) == pytest.approx(3 * layer + EMBEDDING)
    assert per_byte(TIED, Layout()) == TIED.parameters.total
    # 6 layers in chunks of 1, 2, 2, 1: three on each rank.
    interleaved = per_byte(UNTIED, Layout(pp=2, vpp=2))
    assert interleaved == pytest.approx(3 * layer + EMBEDDING)
    # 1, 2, 2, 1 on four ranks: two layers are more than one and the embedding.
    assert per_byte(UNTIED, Layout(pp=4)) == pytest.approx(2 * layer)


def test_the_vocabulary_is_padded() -> None:
    odd = model_spec(SHAPE | {"vocab_size": 509, "tie_word_embeddings": False})
    assert per_byte(odd, Layout(tp=4)) == per_byte(UNTIED, Layout(tp=4))


def test_experts_are_split_by_expert_or_by_tensor_parallel() -> None:
    parts = MIXTRAL.parameters
    assert parts.experts == 6 * 4 * MLP
    whole = per_byte(MIXTRAL, Layout())
    assert whole == parts.total
    assert per_byte(MIXTRAL, Layout(dp=2, ep=2)) == whole - parts.experts / 2
    by_tensor = per_byte(MIXTRAL, Layout(tp=2))
    assert by_tensor == per_byte(MIXTRAL, Layout(tp=2, ep=2))
    replicated = parts.norms + parts.router
    assert by_tensor == (whole - replicated) / 2 + replicated


def test_an_experts_optimizer_states_are_spread_over_who_holds_it() -> None:
    parts = MIXTRAL.parameters
    sharded = Layout(dp=4, ep=2, zero_stage=1)
    dense = (parts.total - parts.experts) * (8 + 8 / 4)
    experts = parts.experts / 2 * (8 + 8 / 2)
    assert ModelStates(MIXTRAL, "fp32", MEGATRON).gib(sharded) * GIB == dense + experts


@pytest.mark.parametrize(("precision", "weight_bytes"), [("bf16", 2), ("fp32", 4)])
def test_a_megatron_model_is_whole_until_deepspeed_shards_it(
    precision: str, weight_bytes: int
) -> None:
    """`MegatronShard` builds all that its tensor-parallel rank computes with."""
    layout = Layout(dp=8, tp=2, zero_stage=3, offload_parameters="cpu")
    whole = ModelStates(UNTIED, precision, ZERO_MEGATRON)
    held = per_byte(UNTIED, Layout(tp=2))
    assert whole.peak_gib(layout) == whole.building_gib(layout)
    assert whole.building_gib(layout) * GIB == weight_bytes * held
    assert whole.gib(layout) < whole.building_gib(layout)
    # What training takes is more than that in stage 2, which keeps the weights whole.
    second = Layout(dp=8, tp=2, zero_stage=2)
    assert whole.peak_gib(second) == whole.gib(second) > whole.building_gib(second)
    for pair in (Pair("deepspeed", "hf"), MEGATRON):
        states = ModelStates(UNTIED, precision, pair)
        assert states.peak_gib(layout) == states.gib(layout)


PLACES = st.sampled_from(["none", "cpu", "nvme"])


@given(
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    pair=st.sampled_from(list(TABLE)),
    dp=st.integers(1, 1000),
    tp=st.sampled_from([1, 2, 4]),
    offload_optimizer=PLACES,
    offload_parameters=PLACES,
)
def test_model_states_never_grow_with_stage_or_ranks(
    precision: str, pair: Pair, dp: int, tp: int, **offload: Any
) -> None:
    states = ModelStates(UNTIED, precision, pair)

    def needed(dp: int, tp: int) -> list[float]:
        return [
            states.gib(Layout(dp=dp, tp=tp, zero_stage=stage, **offload))  # type: ignore[arg-type]
            for stage in range(4)
        ]

    assert needed(dp, tp) == sorted(needed(dp, tp), reverse=True)
    for more in (needed(dp + 1, tp), needed(dp, 2 * tp)):
        assert all(after <= before for before, after in zip(needed(dp, tp), more, strict=True))
    assert needed(dp, tp)[0] <= 18 * UNTIED.parameters.total / GIB
