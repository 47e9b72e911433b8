"""sft and dpo against TRL's own trainers: one process, fp32, the same samples.

What a step logs must be equal: loss, gradient norm, rewards.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.engines.cases import LAYERS, TOLERANCE, megatron
from tests.engines.parity_worker import CONFIG, Case
from tests.engines.post_training_worker import (
    REWARDS,
    STEPS,
    Objective,
    by_dpo_trainer,
    by_sft_trainer,
    initial_model,
    packed_samples,
    pairs,
    references,
    train_all,
    unpacked,
)
from tests.forked import call_ranks

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # TRL calls transformers by a name that it renames.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]

OTHER_SEED = 99
"""Of the reference model: with the policy's own weights, all rewards would begin at 0."""
BETA = 0.3

PACKED = Objective("sft", packed=True)
DPO = {
    loss: Objective("dpo", {"loss": loss, "beta": BETA}) for loss in ("sigmoid", "ipo", "hinge")
}
DDP, PIPELINE = Case("ddp", 1, family=LAYERS), megatron(3, pipeline=2)
BYTES = Case("ddp", 1, family=CONFIG | LAYERS | {"vocab_size": 257})
JOBS = {
    "sigmoid": (DDP, DPO["sigmoid"]),
    "sigmoid in a pipeline": (PIPELINE, DPO["sigmoid"]),
    "ipo": (DDP, DPO["ipo"]),
    "hinge": (DDP, DPO["hinge"]),
    "packed": (BYTES, PACKED),
}
"""What else layouts can do to an objective is in test_pairs.py."""


@cache
def reference_log_probs() -> list[list[float]]:
    """Of each row of each global batch, by plain transformers."""
    model = initial_model(OTHER_SEED, **LAYERS)
    return [references(model, batch) for batch in pairs(STEPS)]


@cache
def by_trl(loss: str) -> dict[str, list[float]]:
    """What TRL logs with this loss of dpo, or of packed sft."""
    with TemporaryDirectory() as folder:
        if loss == "packed":
            batches = unpacked(packed_samples(Path(folder)))
            return by_sft_trainer(Path(folder), initial_model(**BYTES.family), batches)
        models = initial_model(**LAYERS), initial_model(OTHER_SEED, **LAYERS)
        return by_dpo_trainer(Path(folder), *models, loss, BETA)


@cache
def trained() -> dict[str, dict[str, list[float]]]:
    found, *others = call_ranks(train_all, 2, [*JOBS.values()], reference_log_probs())
    assert all(other == found for other in others), "every rank logs the same"
    return dict(zip(JOBS, found, strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_steps_equal_trl(name: str) -> None:
    """Packed rows: on each conversation alone."""
    found, expected = trained()[name], by_trl(name.partition(" ")[0])
    for logged in ("loss", "grad_norm", *(() if name == "packed" else REWARDS)):
        wanted = pytest.approx(expected[logged], rel=TOLERANCE, abs=TOLERANCE)
        assert found[logged] == wanted, logged
