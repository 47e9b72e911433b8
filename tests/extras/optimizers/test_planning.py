"""What 8-bit AdamW keeps and what owners compute, counted by hand."""

from dataclasses import replace

import pytest

from tests.plan.making import optimizer_of
from toolkit.layout import Layout
from toolkit.models.families import model_spec
from toolkit.plan.cost.memory import model_states_gib, peak_memory
from toolkit.plan.cost.workload import Workload
from toolkit.text.units import GIB

SHAPE = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 512,
}  # fmt: skip
EMBEDDING, NORMS = 512 * 64, 2 * 64


@pytest.mark.parametrize("tied", [False, True])
def test_8_bit_states(tied: bool) -> None:
    """Codes, and four bytes for 256 of them; not for embeddings and small tensors."""
    spec = model_spec(SHAPE | {"tie_word_embeddings": tied})
    train = Workload(
        spec, 32, "fp32", "ddp", whole_tensors=optimizer_of("adamw_8bit").kind.whole
    )
    norms = 6 * NORMS + 64
    coded = spec.parameters.total - EMBEDDING - norms
    expected = 8 * spec.parameters.total + 8 * (EMBEDDING + norms) + 2 * coded * (1 + 4 / 256)
    assert model_states_gib(train, Layout()) * GIB == pytest.approx(expected, rel=0.01)
    sharded = replace(train, engine="fsdp")
    found = model_states_gib(sharded, Layout(dp=2, zero_stage=3)) * GIB
    assert found == pytest.approx(expected / 2, rel=0.01)
    # All that is not needed by activations: the largest tensor and its update.
    tiny = replace(train, sequence_length=1)
    with_rule, without = (
        peak_memory(one, Layout())["buffers"]
        for one in (tiny, replace(tiny, whole_tensors=None))
    )
    assert 0 < with_rule - without <= 2 * 4 * (64 * 128 if tied else EMBEDDING)
