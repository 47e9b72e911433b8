"""sft and dpo on every engine against TRL's own trainers: one process, fp32, the same samples.

What a step logs must be equal: loss, gradient norm, rewards. Outside of pipelines, ranks cut
their shares into micro batches of one and two pairs, each in another order.
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
    log_probs_of,
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

SFT = Objective("sft")
PACKED = Objective("sft", packed=True)
DPO = {
    loss: Objective("dpo", {"loss": loss, "beta": BETA}) for loss in ("sigmoid", "ipo", "hinge")
}

CASES = [
    Case("ddp", 1, family=LAYERS),
    Case("deepspeed", 1, stage=2, family=LAYERS),
    megatron(1, tensor=2),
    megatron(3, pipeline=2),
]
"""What else layouts can do to an objective is in test_pairs.py."""
BYTES = Case("ddp", 1, family=CONFIG | LAYERS | {"vocab_size": 257})


@cache
def reference_log_probs() -> list[list[float]]:
    """Of each row of each global batch, by plain transformers."""
    model = initial_model(OTHER_SEED, **LAYERS)
    return [references(model, batch) for batch in pairs(STEPS)]


@cache
def by_trl(objective: str) -> dict[str, list[float]]:
    """What TRL logs: of sft, of packed sft, or of dpo with a loss of this name."""
    with TemporaryDirectory() as folder:
        if objective == "packed":
            batches = unpacked(packed_samples(Path(folder)))
            return by_sft_trainer(Path(folder), initial_model(**BYTES.family), batches)
        model = initial_model(**LAYERS)
        if objective == "sft":
            return by_sft_trainer(Path(folder), model, conversations())
        reference = initial_model(OTHER_SEED, **LAYERS)
        return by_dpo_trainer(Path(folder), model, reference, loss=objective, beta=BETA)


@cache
def trained() -> dict[tuple[str, str], dict[str, list[float]]]:
    """Every case with sft and dpo; the first with every loss of dpo; one with packed rows."""
    jobs = [(case, objective) for case in CASES for objective in (SFT, DPO["sigmoid"])]
    jobs += [(CASES[0], DPO[loss]) for loss in ("ipo", "hinge")]
    jobs += [(BYTES, PACKED)]
    found, *others = call_ranks(train_all, 2, jobs, reference_log_probs())
    assert all(other == found for other in others), "every rank logs the same"
    names = [
        (case.name, "packed" if o.packed else o.settings.get("loss", o.name))
        for case, o in jobs
    ]
    return dict(zip(names, found, strict=True))


def check(found: dict[str, list[float]], objective: str) -> None:
    expected = by_trl(objective)
    metrics = () if objective in ("sft", "packed") else REWARDS
    for name in ("loss", "grad_norm", *metrics):
        assert found[name] == pytest.approx(expected[name], rel=TOLERANCE, abs=TOLERANCE), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("objective", ["sft", "sigmoid"])
def test_steps_equal_trl(case: Case, objective: str) -> None:
    check(trained()[case.name, objective], objective)


def test_packed_rows_equal_trl_on_each_conversation_alone() -> None:
    check(trained()[BYTES.name, "packed"], "packed")


@pytest.mark.parametrize("loss", ["ipo", "hinge"])
def test_losses_of_dpo_equal_trl(loss: str) -> None:
    check(trained()[CASES[0].name, loss], loss)


def test_log_probs_of_rows_are_those_of_single_sequences() -> None:
    expected = references(initial_model(**LAYERS), pairs(1)[0])
    by_rank = call_ranks(log_probs_of, 2, CASES)
    for number, case in enumerate(CASES):
        # Of two data-parallel ranks, the second has the second half; others have all.
        shares = [rank[number] for rank in by_rank]
        assert shares[-1] == pytest.approx(expected[-len(shares[-1]) :], rel=TOLERANCE), case
        assert shares[0] == pytest.approx(expected[: len(shares[0])], rel=TOLERANCE), case
