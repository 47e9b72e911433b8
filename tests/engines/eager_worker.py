"""What every rank of test_eager.py does: train where nobody may call a fused attention."""

from typing import Any
from unittest.mock import patch

from tests.engines.parity_worker import Case, train
from toolkit.engines.distributed import Ranks


def train_eagerly(case: Case, ranks: Ranks) -> Any:
    """See `parity_worker.train`."""
    name = "scaled_dot_product_attention"
    places = [f"torch.nn.functional.{name}"]
    if case.engine == "megatron":
        places.append(f"toolkit.models.megatron.attention.{name}")
    for place in places:
        patch(place, side_effect=AssertionError("a fused kernel was asked for")).start()
    try:
        return train(case, ranks)
    finally:
        patch.stopall()
