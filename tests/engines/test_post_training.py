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
    conversations,
    initial_model,
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

DPO = {
    loss: Objective("dpo", {"loss": loss, "beta": BETA}) for loss in ("sigmoid", "ipo", "hinge")
}
DDP = Case("ddp", 1, family=LAYERS)
BYTES = Case("ddp", 1, family=CONFIG | LAYERS | {"vocab_size": 257})
JOBS = {
    "sigmoid": (DDP, DPO["sigmoid"]),
    "sigmoid in a pipeline": (megatron(3, pipeline=2), DPO["sigmoid"]),
    "sigmoid on tensor ranks": (megatron(1, tensor=2), DPO["sigmoid"]),
    "sigmoid in ZeRO": (Case("deepspeed", 1, stage=2, family=LAYERS), DPO["sigmoid"]),
    "ipo": (DDP, DPO["ipo"]),
    "hinge": (DDP, DPO["hinge"]),
    "packed": (BYTES, Objective("sft")),
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
            batches = unpacked(conversations(Path(folder)))
            return by_sft_trainer(Path(folder), initial_model(**BYTES.family), batches)
        models = initial_model(**LAYERS), initial_model(OTHER_SEED, **LAYERS)
        return by_dpo_trainer(Path(folder), *models, loss, BETA)


@cache
def trained() -> tuple[dict[str, dict[str, list[float]]], dict[str, list[list[float]]]]:
    """What is logged, and each rank's log-probabilities of the first batch."""
    ranks = call_ranks(train_all, 2, [*JOBS.values()], reference_log_probs())
    before = [[one.pop("before") for one in rank] for rank in ranks]
    found, *others = ranks
    assert all(other == found for other in others), "every rank logs the same"
    each_rank = zip(*before, strict=True)
    return dict(zip(JOBS, found, strict=True)), dict(zip(JOBS, each_rank, strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_steps_equal_trl(name: str) -> None:
    """Packed rows: on each conversation alone."""
    found, expected = trained()[0][name], by_trl(name.partition(" ")[0])
    for logged in ("loss", "grad_norm", *(() if name == "packed" else REWARDS)):
        wanted = pytest.approx(expected[logged], rel=TOLERANCE, abs=TOLERANCE)
        assert found[logged] == wanted, logged


@pytest.mark.parametrize("name", [name for name in JOBS if name != "packed"])
def test_log_probs_of_rows_are_those_of_single_sequences(name: str) -> None:
    """Data-parallel ranks have a half each; ranks that share a model have all."""
    expected = references(initial_model(**LAYERS), pairs(1)[0])
    first, last = trained()[1][name]
    assert first == pytest.approx(expected[: len(first)], rel=TOLERANCE)
    assert last == pytest.approx(expected[-len(last) :], rel=TOLERANCE)
