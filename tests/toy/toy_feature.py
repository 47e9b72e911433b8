"""A complete feature of another package: a loss that is scaled, and sent in fp64."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from toolkit.batch import MicroBatch
from toolkit.errors import Problem
from toolkit.features.base import Feature
from toolkit.objectives.base import LossTerms, Objective
from toolkit.recipe.section import PositiveFloat, Section


class ScaledLoss(Section):
    """Scales the loss."""

    factor: PositiveFloat = 2.0
    """The loss is multiplied by this."""


class Scaled:
    """An objective whose loss is multiplied."""

    def __init__(self, plain: Objective, factor: float) -> None:
        self._plain, self._factor = plain, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def loss(self, log_probs: Any, batch: MicroBatch) -> LossTerms:
        """See `Objective.loss`."""
        terms = self._plain.loss(log_probs, batch)
        return LossTerms(terms.loss * self._factor, terms.metrics)


def problems(recipe: Any) -> Iterator[Problem]:
    """It has been tried in fp32 only."""
    if (precision := recipe.training.precision) != "fp32":
        fix = "set training.precision to fp32"
        yield Problem("training.precision", f"{precision} with scaled_loss", "fp32", fix)


def scaled(plain: Objective, settings: ScaledLoss) -> Scaled:
    """What is minimised."""
    return Scaled(plain, settings.factor)


def mean_loss(plain: Any, settings: ScaledLoss) -> Any:
    """What a rehearsal compares it with."""
    return plain * settings.factor


def workload(plain: Any, _settings: ScaledLoss) -> Any:
    """Gradients of 8 bytes on the wire."""
    return replace(plain, reduce_bytes=8.0)


def ledger(settings: ScaledLoss, *_: object) -> Iterator[tuple[str, str, str]]:
    """Its entry."""
    yield "exact", "scaled loss", f"{settings.factor:g} times the mean of the whole batch"


FEATURE = Feature(
    name="scaled_loss",
    section=ScaledLoss,
    check="toy_feature:problems",
    reads=("training.precision",),
    cost="toy_feature:workload",
    ledger="toy_feature:ledger",
    objective="toy_feature:scaled",
    reference_loss="toy_feature:mean_loss",
    packages={"toy-scales": "toy_scales"},
    foreign={"scaled_loss.factor": "loss_multiplier"},
)
