"""orpo by TRL's own function; what no split of a batch may change. All losses by a second
definition are in tests/rehearse/test_losses.py, sft and dpo by TRL's trainers in
test_trl.py."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from toolkit.batch import IGNORE_INDEX, MicroBatch
from toolkit.errors import DataError
from toolkit.objectives.base import Objective, check_batch
from toolkit.objectives.preference import REFERENCE, Dpo, Orpo

PAIRS, LENGTH = 5, 6


def batch() -> tuple[Tensor, MicroBatch]:
    """Log-probabilities with history, and pairs with answers of 1 to 6 tokens."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(9, (2 * PAIRS, LENGTH), generator=generator)
    labels = tokens.clone()
    for row in range(2 * PAIRS):
        labels[row, : (5 * row) % LENGTH] = IGNORE_INDEX
    made = MicroBatch(tokens, labels, extra={REFERENCE: -6 * torch.rand(2 * PAIRS)})
    log_probs = -2 * torch.rand(labels.shape, generator=generator) * made.trained
    return log_probs.requires_grad_(), made


def part(made: MicroBatch, first: int, last: int) -> MicroBatch:
    """Some pairs of a batch."""
    rows = slice(2 * first, 2 * last)
    extra = {name: values[rows] for name, values in made.extra.items()}
    return MicroBatch(made.input_ids[rows], made.labels[rows], extra=extra)


OBJECTIVES_OF_PAIRS = [Dpo(), Dpo("ipo", sft_weight=1.0), Dpo("hinge"), Orpo(beta=0.6)]


@pytest.mark.parametrize("objective", OBJECTIVES_OF_PAIRS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("split", [[5], [1, 1, 1, 1, 1], [1, 3, 1], [4, 1]], ids=str)
def test_a_split_changes_nothing(objective: Objective, split: list[int]) -> None:
    log_probs, made = batch()
    whole = objective.loss(log_probs, made)
    (gradient,) = torch.autograd.grad(whole.loss, log_probs)
    first, losses, counts, metrics = 0, [], [], []
    for size in split:
        here = part(made, first, first + size)
        terms = objective.loss(log_probs[2 * first : 2 * (first + size)], here)
        losses.append(terms.loss)
        counts.append(objective.count(here))
        metrics.append(terms.metrics)
        first += size
    assert sum(counts) == objective.count(made) == PAIRS
    assert sum(losses).item() == pytest.approx(whole.loss.item(), rel=1e-12)
    assert torch.autograd.grad(sum(losses), log_probs)[0] == pytest.approx(gradient, rel=1e-6)
    assert set(whole.metrics) == set(objective.metrics)
    for name, value in whole.metrics.items():
        assert sum(m[name] for m in metrics).item() == pytest.approx(value.item(), rel=1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES_OF_PAIRS, ids=lambda one: type(one).__name__)
def test_padding_counts_nothing(objective: Objective) -> None:
    """Validation fills its last global batch up with pairs of which nothing is trained."""
    log_probs, made = batch()
    labels = made.labels.clone()
    labels[4:] = IGNORE_INDEX
    padded = replace(made, labels=labels)
    zeroed = log_probs * padded.trained
    found, wanted = (
        objective.loss(zeroed, padded),
        objective.loss(log_probs[:4], part(made, 0, 2)),
    )
    assert objective.count(padded) == 2
    assert found.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-12)
    for name, value in wanted.metrics.items():
        assert found.metrics[name].item() == pytest.approx(value.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(found.loss, log_probs)
    assert torch.isfinite(gradient).all() and not gradient[4:].any()


def test_orpo_is_that_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its odds ratio. TRL's cross entropy covers the prompt too; the paper's does not."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    log_probs, made = batch()
    means = log_probs.detach().sum(dim=1) / made.trained.sum(dim=1)
    trl = SimpleNamespace(beta=0.6, accelerator=SimpleNamespace(device="cpu"))
    ratios, chosen, rejected, ratio, odds = ORPOTrainer.odds_ratio_loss(
        trl, means[0::2], means[1::2]
    )
    found = Orpo(beta=0.6).loss(log_probs, made)
    metrics = {name: value.item() / PAIRS for name, value in found.metrics.items()}
    wanted = (-means[0::2] - ratios).sum().item()
    assert found.loss.item() == pytest.approx(wanted, rel=1e-6)
    assert metrics == pytest.approx(
        {
            "rewards/chosen": chosen.mean().item(),
            "rewards/rejected": rejected.mean().item(),
            "rewards/accuracies": (chosen > rejected).float().mean().item(),
            "rewards/margins": (chosen - rejected).mean().item(),
            "logps/chosen": means[0::2].mean().item(),
            "logps/rejected": means[1::2].mean().item(),
            "nll_loss": -means[0::2].mean().item(),
            "log_odds_ratio": ratio.item(),
            "log_odds_chosen": odds.item(),
        },
        rel=1e-5,
    )


@pytest.mark.parametrize("log_p", [0.0, -1e-9, -1e-7, -1e-4, -1.0, -80.0])
def test_orpo_is_finite_for_sure_and_for_impossible_answers(log_p: float) -> None:
    """huggingface/trl#3237: by log(1 - exp(log p)), a sure answer's odds are not finite."""
    tokens = torch.ones(2, 1, dtype=torch.int64)
    made = MicroBatch(tokens, tokens)
    log_probs = torch.tensor([[log_p], [-0.5]], requires_grad=True)
    found = Orpo().loss(log_probs, made)
    (gradient,) = torch.autograd.grad(found.loss, log_probs)
    assert math.isfinite(found.loss.item()) and torch.isfinite(gradient).all()
    if log_p < -1e-6:
        p, q = math.exp(log_p), math.exp(-0.5)
        wanted = math.log(p / -math.expm1(log_p)) - math.log(q / (1 - q))
        assert found.metrics["log_odds_chosen"].item() == pytest.approx(wanted, rel=1e-6)


def test_dpo_without_a_reference_is_refused() -> None:
    _, made = batch()
    check_batch(Dpo(), made)
    check_batch(Orpo(), replace(made, extra={}))
    with pytest.raises(DataError, match="reads reference_log_probs"):
        check_batch(Dpo(), replace(made, extra={}))
