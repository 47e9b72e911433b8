"""`dmt tune --search`: Optuna chooses points of a space, which are trained and compared.

Several processes may search in one folder.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from toolkit.extras.tune.space import Space, overrides_of, suggest
from toolkit.extras.tune.study import FAILURES, Study, TrialRecord, TuneRequest
from toolkit.extras.tune.trial import Followed
from toolkit.recipe.schema import Recipe
from toolkit.text.dotted import is_within

_WARMUPS = ("schedule.warmup_steps", "schedule.warmup_ratio")
_REDUCTION = 2
"""At a rung, one trial in so many continues (ASHA: Li et al. 2020, arXiv:1810.05934)."""


class SearchStudy(Study):
    """Trials of points of a space. A trial's value is the loss at its end."""

    measures, whole = "loss", True
    fatal = (*FAILURES, "out_of_memory", "diverged")

    def __init__(self, request: TuneRequest, space: Space, seed: int = 0) -> None:
        texts = str({key: str(one) for key, one in space.items()})
        super().__init__(request, kind="search", space=texts)
        self.space, self.rung = space, first_rung(request.recipe, space)
        self.end = request.recipe.total_steps() or 0
        # The same seed would suggest the same points again.
        seed += len(self.study.get_trials(deepcopy=False))
        self.study.sampler = self.optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)
        if self.rung is not None:
            self.study.pruner = self.optuna.pruners.SuccessiveHalvingPruner(
                self.rung, _REDUCTION
            )

    def columns(self) -> Mapping[str, Callable[[TrialRecord], str]]:
        return {
            "steps": lambda one: f"{one.steps:,}",
            "loss": lambda one: "-" if one.value is None else f"{one.value:.4f}",
            "settings": lambda one: " ".join(overrides_of(one.settings)),
        }

    def left(self) -> int:
        """How many trials are left. Points that the recipe's rules refuse do not count."""
        return self.request.trials - sum(one.ending != "refused" for one in self.counted())

    def choose(self, trial: Any) -> dict[str, Any]:
        """Let Optuna choose a point. For a killed trial it chooses the same point again."""
        for key, distribution in self.space.items():
            suggest(trial, key, distribution)
        return dict(trial.params)

    def overrides(self, settings: Mapping[str, Any]) -> list[str]:
        return [*self.request.overrides, *overrides_of(settings)]

    def values(self, followed: Followed) -> dict[int, float]:
        """Losses by step: of validation if there are any, else of training."""
        evaluations = [one for one in followed.events if one.get("kind") == "evaluation"]
        by_step: dict[int, float] = {}
        for line in evaluations if validates(self.request.recipe) else followed.metrics:
            with suppress(KeyError, TypeError, ValueError):
                by_step[int(line["step"])] = float(line["loss"])
        return by_step


def validates(recipe: Recipe) -> bool:
    """Whether runs of the recipe have a validation loss."""
    return recipe.data.validation is not None or recipe.data.validation_fraction > 0


def first_rung(recipe: Recipe, space: Space) -> int | None:
    """Steps after which ASHA first ends trials: a quarter of the run (half, if the warm-up is
    searched), and the first loss after the recipe's own warm-up. None if that is no step before
    the end."""
    steps = recipe.total_steps()
    every = (recipe.evaluation if validates(recipe) else recipe.logging).every_steps
    if every is None or steps is None:
        return None
    share = _REDUCTION if any(is_within(key, _WARMUPS) for key in space) else _REDUCTION**2
    warmup = int(recipe.schedule.warmup(steps))
    rung = every * max(math.ceil(steps / share / every), warmup // every + 1)
    return rung if rung < steps else None
