"""What context parallel costs: traffic, memory and their formulas in papers."""

from dataclasses import replace

import pytest

from toolkit.layout import Exchange, Layout
from toolkit.models.families import model_spec
from toolkit.plan.cost.layer import layer_activations
from toolkit.plan.cost.memory import peak_memory
from toolkit.plan.cost.time import step_time
from toolkit.plan.cost.workload import Workload
from toolkit.plan.hardware.cluster import parse_cluster

TOKENS, HIDDEN, KEYS = 8192, 1024, 256
"""Of a row; elements of a token's queries, and of its keys."""
SPEC = model_spec(
    {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 4096,
        "vocab_size": 32000, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "tie_word_embeddings": False,
    }
)  # fmt: skip
WORKLOAD = Workload(SPEC, TOKENS, "bf16", "deepspeed", fused_elementwise=False)
CLUSTER = parse_cluster("2x8xh100-80gb")
EXCHANGES: tuple[Exchange, ...] = ("all_gather", "ulysses")


def sent(exchange: Exchange, cp: int) -> float:
    """Bytes that each rank of a group receives in a layer's forward pass."""
    layout = Layout(dp=16 // cp, cp=cp, exchange=exchange, zero_stage=3)
    return step_time(WORKLOAD, layout, CLUSTER)["context_bytes"]


def test_bytes_of_each_exchange() -> None:
    """Gathering moves all keys and values, `ulysses` a quarter of queries, keys, values and
    output. With 8 ranks for 4 key heads, keys are repeated."""
    whole = 2 * 2 * TOKENS * KEYS
    assert sent("all_gather", 4) == whole * 3 / 4
    own = 2 * TOKENS / 4 * (2 * HIDDEN + 2 * KEYS)
    assert sent("ulysses", 4) == own * 3 / 4
    repeated = 2 * TOKENS / 8 * (2 * HIDDEN + 2 * 2 * KEYS)
    assert sent("ulysses", 8) == repeated * 7 / 8


def test_recompute_exchanges_again() -> None:
    once, twice = (
        step_time(WORKLOAD, Layout(dp=4, cp=4, recompute=way), CLUSTER)["waiting_context"]
        for way in ("none", "full")  # type: ignore[arg-type]
    )
    assert twice == pytest.approx(1.5 * once)


def test_kept_keys_and_values() -> None:
    """Gathered ones are kept whole, whatever the degree; heads are sent twice as often as there
    are keys for. Both keep attention's output twice."""
    kept = {}
    for one in EXCHANGES:
        layer = layer_activations(WORKLOAD, Layout(cp=8, exchange=one)).stored
        kept[one] = layer["qkv"] + layer["attention"]
    assert kept["all_gather"] - kept["ulysses"] == 2 * TOKENS / 8 * 6 * 2 * KEYS


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_everything_else_is_divided(exchange: Exchange) -> None:
    """Logits and the residual stream by the degree; ZeRO shards over data and context ranks."""
    split = Layout(dp=4, cp=4, zero_stage=3, exchange=exchange)
    whole, part = (peak_memory(WORKLOAD, one) for one in (Layout(dp=16), split))
    assert whole["logits"] == pytest.approx(4 * part["logits"])
    assert whole["layer_bytes"] > 2 * part["layer_bytes"]
    plain = replace(split, dp=16, cp=1)
    states = [peak_memory(WORKLOAD, one).model_states for one in (plain, split)]
    assert states[0] == states[1]
