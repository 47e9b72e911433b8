"""What 8-bit AdamW keeps and moves, counted by hand."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.plan.making import TINY, optimizer_of
from toolkit.hardware.cluster import default_cluster
from toolkit.layout import Layout
from toolkit.models.families import model_spec
from toolkit.plan.cost.efficiency import DEFAULT
from toolkit.plan.cost.memory import model_states_gib, peak_memory
from toolkit.plan.cost.operators import device
from toolkit.plan.cost.owned import owner_updates
from toolkit.plan.cost.time import step_time
from toolkit.plan.cost.workload import Workload
from toolkit.text.units import GIB

SHAPE = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 512,
}  # fmt: skip
EMBEDDING, NORMS = 512 * 64, 2 * 64
LLAMA = TINY | {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
    "num_key_value_heads": 4, "num_hidden_layers": 6,
}  # fmt: skip
CLUSTER = default_cluster(1, 8, "h100-80gb")


def workload(config: Mapping[str, object], optimizer: str) -> Workload:
    updates = owner_updates(config, (), optimizer_of(optimizer))
    return Workload(model_spec(config), 1024, "bf16", "ddp", updates=updates)


@pytest.mark.parametrize("tied", [False, True])
def test_8_bit_states(tied: bool) -> None:
    """Codes, and four bytes for 256 of them; not for embeddings and small tensors."""
    updates = owner_updates(
        SHAPE | {"tie_word_embeddings": tied}, (), optimizer_of("adamw_8bit")
    )
    spec = model_spec(SHAPE | {"tie_word_embeddings": tied})
    train = Workload(spec, 32, "fp32", "ddp", updates=updates)
    norms = 6 * NORMS + 64
    coded = spec.parameters.total - EMBEDDING - norms
    expected = 8 * spec.parameters.total + 8 * (EMBEDDING + norms) + 2 * coded * (1 + 4 / 256)
    assert model_states_gib(train, Layout()) * GIB == expected
    sharded = replace(train, engine="fsdp")
    found = model_states_gib(sharded, Layout(dp=2, zero_stage=3)) * GIB
    assert found == pytest.approx(expected / 2)
    # All that is not needed by activations: the largest tensor and its update.
    tiny = replace(train, sequence_length=1)
    with_rule, without = (
        peak_memory(one, Layout())["buffers"] for one in (tiny, replace(tiny, updates=None))
    )
    assert 0 < with_rule - without <= 2 * 4 * (64 * 128 if tied else EMBEDDING)


def test_8_bit_moves_memory() -> None:
    """All but the embedding, which is the head here, too."""
    train = workload(LLAMA, "adamw_8bit")
    gpu = device(CLUSTER.gpu, train, DEFAULT)
    with_rule, without = (
        step_time(one, Layout(), CLUSTER)["update"]
        for one in (train, replace(train, updates=None))
    )
    owned = train.spec.parameters.total - LLAMA["vocab_size"] * 1024
    assert (with_rule - without) * gpu.memory / 28 == pytest.approx(owned)
