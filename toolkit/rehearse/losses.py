"""A second implementation of the objectives, from logits, for comparison with the layouts.

Deliberately independent of toolkit/objectives, which states the sources, and one pair at a
time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid, relu

from toolkit.batch import IGNORE_INDEX
from toolkit.objectives import OBJECTIVES
from toolkit.recipe.schema import BalanceSection, DpoSection, OrpoSection, Recipe

DEFINED = ("pretrain", "sft", "dpo", "orpo")


def rehearsed_objective(recipe: Recipe) -> str:
    """The recipe's objective, or for another package's objective, one for the same data."""
    chosen, kind = recipe.training.objective, recipe.data.kind
    if chosen in DEFINED:
        return chosen
    return next(name for name in DEFINED if kind in OBJECTIVES[name].data_kinds)


def mean_loss(recipe: Recipe, logits: Tensor, labels: Tensor, reference: Tensor) -> Tensor:
    """Loss of a global batch with `logits` [rows, sequence, vocabulary].

    `reference` [rows]: `row_log_probs` under the first weights.
    """
    objective = recipe.training.objective
    if objective == "dpo":
        settings = recipe.dpo or DpoSection()
        pairs = _pairs(labels, row_log_probs(logits, labels) - reference)
        losses = [_dpo(settings, *pair) for pair in pairs]
        if settings.sft_weight:
            logged = _pairs(labels, row_log_probs(logits, labels))
            losses += [-settings.sft_weight * yes / length for yes, _, length, _ in logged]
        return torch.stack(losses).sum() / len([*_pairs(labels, reference)])
    if objective == "orpo":
        beta = (recipe.orpo or OrpoSection()).beta
        pairs = _pairs(labels, row_log_probs(logits, labels))
        return torch.stack([_orpo(beta, *pair) for pair in pairs]).mean()
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def row_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed log-probability of each row's labels, [rows]."""
    kept = labels != IGNORE_INDEX
    chosen = logits.log_softmax(-1).gather(-1, (labels * kept)[..., None])[..., 0]
    return (chosen * kept).sum(dim=1)


def _pairs(labels: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """Values of chosen and rejected row, and their numbers of labels, where there are any."""
    lengths = (labels != IGNORE_INDEX).sum(dim=1).tolist()
    for row in range(0, len(labels), 2):
        if lengths[row] or lengths[row + 1]:
            yield (
                values[row],
                values[row + 1],
                max(lengths[row], 1),
                max(lengths[row + 1], 1),
            )


def _dpo(settings: DpoSection, yes: Tensor, no: Tensor, length: int, other: int) -> Tensor:
    """The loss of a pair, from the log ratios of policy and reference."""
    if settings.loss == "ipo":
        return (yes / length - no / other - 0.5 / settings.beta) ** 2
    margin = settings.beta * (yes - no)
    if settings.loss == "hinge":
        return relu(1.0 - margin)
    doubt = settings.label_smoothing
    return -logsigmoid(margin) * (1.0 - doubt) - logsigmoid(-margin) * doubt


def _orpo(beta: float, yes: Tensor, no: Tensor, length: int, other: int) -> Tensor:
    """The loss of a pair, from the log-probabilities of its answers."""
    p, q = (yes.double() / length).exp(), (no.double() / other).exp()
    odds_ratio = p * (1 - q) / (q * (1 - p))
    return -yes / length - beta * logsigmoid(odds_ratio.log())


def tokens_of(labels: Tensor) -> int:
    """Tokens of a row up to the last that is trained."""
    trained = (labels != IGNORE_INDEX).nonzero()
    return int(trained[-1]) + 1 if len(trained) else 0


def balance_terms(
    balance: BalanceSection, sigmoid: bool, logits: Tensor, indices: Tensor, labels: Tensor
) -> Tensor:
    """The balancing loss of one layer's router, a row at a time: `logits` and the `indices` of
    the chosen experts are [rows · sequence, …]."""
    total = torch.zeros(())
    rows = labels.shape[0]
    for label, row, chosen in zip(labels, logits.chunk(rows), indices.chunk(rows), strict=True):
        length = tokens_of(label)
        if not length:
            continue
        row, chosen = row[:length], chosen[:length].flatten()
        scores = row.sigmoid() if sigmoid else row.exp()
        shares = (scores / scores.sum(-1, keepdim=True)).mean(0)
        experts = len(shares)
        frequency = chosen.bincount(minlength=experts) * experts / len(chosen)
        squares = row.exp().sum(-1).log().pow(2)
        total = total + balance.coefficient * (frequency * shares).sum()
        total = total + balance.z_loss * squares.mean()
    return total / rows
