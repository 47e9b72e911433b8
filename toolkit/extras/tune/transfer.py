"""`--transfer`: the learning rate of a large model, from searches on two narrower ones.

The space is searched on the narrower proxy. With its other settings, the learning rate is then
tried in equal factors on both, and the optimum of each is that of a parabola through the
logarithms. A published law carries it from the wider proxy to the model; how far the law is off
between the two is the error, which grows with the distance. It is an estimate: the proxies
differ from the model in width only, and the laws are those of AdamW and random weights.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from toolkit.errors import PlanError, RunFailed
from toolkit.extras.tune.search import HyperparameterSearch, SearchRequest, TrialRunner
from toolkit.extras.tune.space import Choices, Range, SearchSpace
from toolkit.intake.load import load_recipe
from toolkit.models.config_check import check_config
from toolkit.models.families import model_spec, settings_of
from toolkit.models.hub import model_config
from toolkit.plan.planned import Planned
from toolkit.planning import plan_recipe
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.schema import Recipe

RATE = "optimizer.learning_rate"
LAWS = {
    "mup": (-1.0, "width", "1/width (muP with Adam: Yang et al. 2022, arXiv:2203.03466)"),
    "step-law": (-0.713, "parameters", "N^-0.713 (Step Law: Li et al. 2025, arXiv:2503.04715)"),
}
"""By name: exponent, of what, and source."""
_NARROWER = (16, 8, 4, 2)
_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
"""Learning rates that are tried, around where the optimum is expected."""
_SCALED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "n_inner",
)  # fmt: skip


@dataclass(frozen=True)
class ProxyModel:
    """The model with a fraction of its width, as planned."""

    width: int
    planned: Planned
    overrides: tuple[str, ...]

    @property
    def parameters(self) -> int:
        return self.planned.plan.parameters


@dataclass(frozen=True)
class Optimum:
    """The best learning rate of one width."""

    width: int
    parameters: int
    rate: float
    error: float
    """Standard error of its natural logarithm."""


@dataclass(frozen=True)
class TransferredRate:
    """The learning rate of the model, as a law carries it there."""

    law: str
    optima: tuple[Optimum, Optimum]
    width: int
    rate: float
    error: float
    """Of its natural logarithm."""
    settings: Mapping[str, Any]
    """The other settings of the space, those of the best trial on the narrowest proxy."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The rate less and more its error."""
        return self.rate * math.exp(-self.error), self.rate * math.exp(self.error)

    def __str__(self) -> str:
        low, high = self.bounds
        found = " and ".join(f"{one.rate:.3g} at width {one.width}" for one in self.optima)
        return (
            f"an estimate: {self.rate:.3g}, between {low:.3g} and {high:.3g}, by "
            f"{LAWS[self.law][2]} from {found} to width {self.width}"
        )


def proxy_models(request: SearchRequest) -> list[ProxyModel]:
    """Two proxies, the narrower first, planned as the model is.

    Raises PlanError for a model or a space from which nothing can be transferred.
    """
    recipe = load_recipe(request.recipe, request.overrides)
    if not any(isinstance(one, Range) and one.key == RATE for one in request.space.parameters):
        raise PlanError(f"--transfer: the space has no range of {RATE}", fix="add one")
    if recipe.model.init != "random" or recipe.optimizer.kind.whole is not None:
        raise PlanError(
            "--transfer: the laws are those of AdamW and random weights",
            fix="search the model itself, without --transfer",
        )
    found = []
    for factor in _NARROWER:
        config = narrowed(model_config(recipe.model), factor)
        if config is None:
            continue
        stated = f"model.config={in_yaml(config)}"
        overrides = (*request.overrides, stated)
        planned = plan_recipe(load_recipe(request.recipe, overrides))
        if planned.search.fits:
            width = settings_of(config)["hidden_size"]
            found.append(ProxyModel(width, planned, overrides))
    if len(found) < 2:
        raise PlanError(
            f"--transfer: {len(found)} proxies of a 16th to half of the model's width can be "
            "made and fit these devices, 2 are needed",
            fix="search the model itself, without --transfer",
        )
    return found[:2]


def narrowed(config: Mapping[str, Any], factor: int) -> dict[str, Any] | None:
    """The config with so many times fewer heads of the same size; None where that is not
    possible, or does not make all of the model narrower."""
    settings, sizes = settings_of(config), {}
    if model_spec(config).experts or settings["qk_rope_head_dim"] is not None:
        return None
    for name in _SCALED:
        size = settings[name]
        if size is None:
            continue
        fewer = size // factor
        if name == "num_key_value_heads":
            fewer = max(1, fewer)
        elif size % factor:
            return None
        sizes[settings.spelling(name)] = fewer
    narrow = {**config, **sizes}
    return None if check_config(narrow) else narrow


class Transfer:
    """The searches on two proxies, each in a folder of its own, and what they say."""

    def __init__(
        self,
        request: SearchRequest,
        law: str,
        proxies: Sequence[ProxyModel],
        run: TrialRunner,
    ) -> None:
        self._request, self._law, self._proxies, self._run_trial = request, law, proxies, run
        self.recipe: Recipe = load_recipe(request.recipe, request.overrides)

    def run(self) -> TransferredRate | None:
        """Run what is left; None when a signal ended it before its end. Raises as the searches,
        and RunFailed where an optimum is not among the rates that were tried."""
        small, wide = self._proxies
        first = self._search(small, "search", self._request.space)
        if first is None:
            return None
        done = first.completed()
        if not done:
            raise RunFailed(
                f"--transfer: no trial of width {small.width} came to its end",
                fix=f"the reasons are in {first.request.folder}/trials/*/launch.log",
            )
        best = dict(min(done, key=lambda one: one.value).params)
        one = self._optimum(small, best, best[RATE])
        if one is None:
            return None
        two = self._optimum(wide, best, one.rate * self._ratio(small, wide))
        return None if two is None else self._carried((one, two), best)

    def _carried(
        self, optima: tuple[Optimum, Optimum], best: dict[str, Any]
    ) -> TransferredRate:
        """From the wider proxy to the model."""
        exponent, _, _ = LAWS[self._law]
        model = plan_recipe(self.recipe).plan.parameters
        width = settings_of(model_config(self.recipe.model))["hidden_size"]
        small, wide = optima
        sizes = [small.width, wide.width, width]
        if LAWS[self._law][1] == "parameters":
            sizes = [small.parameters, wide.parameters, model]
        known, distance = math.log(sizes[1] / sizes[0]), math.log(sizes[2] / sizes[1])
        off = abs(math.log(wide.rate / small.rate) - exponent * known)
        off = max(off, math.hypot(small.error, wide.error)) / known
        error = math.hypot(wide.error, off * distance)
        rate = wide.rate * math.exp(exponent * distance)
        others = {key: value for key, value in best.items() if key != RATE}
        return TransferredRate(self._law, optima, width, rate, error, others)

    def _ratio(self, small: ProxyModel, wide: ProxyModel) -> float:
        """What the law multiplies the rate by."""
        exponent, of, _ = LAWS[self._law]
        sizes = [one.width if of == "width" else one.parameters for one in (small, wide)]
        return float((sizes[1] / sizes[0]) ** exponent)

    def _optimum(
        self, proxy: ProxyModel, best: Mapping[str, Any], expected: float
    ) -> Optimum | None:
        """Try rates around the expected one, the other settings as they are."""
        space = self._request.space
        fixed = space.overrides({key: value for key, value in best.items() if key != RATE})
        rates = Choices(RATE, tuple(in_yaml(expected * factor) for factor in _FACTORS))
        proxy = replace(proxy, overrides=(*proxy.overrides, *fixed))
        # Another best trial, or another law: a search of its own.
        settled = hashlib.sha256(json.dumps([fixed, rates.values]).encode()).hexdigest()[:8]
        name = f"rates-{expected:.3g}-{settled}"
        search = self._search(proxy, name, SearchSpace((rates,)), grid=True)
        if search is None:
            return None
        points = sorted(
            (math.log(float(one.params[RATE])), one.value) for one in search.completed()
        )
        rate, error = vertex(points, f"width {proxy.width}")
        return Optimum(proxy.width, proxy.parameters, math.exp(rate), error)

    def _search(
        self, proxy: ProxyModel, name: str, space: SearchSpace, *, grid: bool = False
    ) -> HyperparameterSearch | None:
        """Run a search on a proxy; None when it was interrupted."""
        request = replace(
            self._request,
            overrides=proxy.overrides,
            space=space,
            folder=self._request.folder / f"width-{proxy.width}" / name,
        )
        if grid:
            request = replace(request, sampler="grid", prune=False, trials=len(_FACTORS))
        search = HyperparameterSearch(request, self._run_trial)
        return search if search.run() else None


def vertex(points: Sequence[tuple[float, float]], where: str) -> tuple[float, float]:
    """The x of the lowest point of a parabola through the lowest of these points and two on
    each side of it, as far as there are, and its standard error. Raises RunFailed where the
    lowest point is the first or the last."""
    lowest = min(range(len(points)), key=lambda at: points[at][1]) if points else 0
    if not 0 < lowest < len(points) - 1:
        raise RunFailed(
            f"--transfer: the best learning rate of {where} is not among those tried",
            fix=f"a space with a wider range of {RATE}, or more --trials",
        )
    near = np.array(points[max(0, lowest - 2) : lowest + 3])
    x, y = near[:, 0] - points[lowest][0], near[:, 1]
    matrix = np.stack([x**2, x, np.ones_like(x)], axis=1)
    fit = np.linalg.lstsq(matrix, y, rcond=None)[0]
    square, slope = float(fit[0]), float(fit[1])
    place = -slope / (2 * square) if square > 0 else 0.0
    place = float(np.clip(place, x[0], x[-1]))
    spacing = float(np.diff(x).max())
    error = spacing / 2  # trials differ by more than the parabola: at least what a grid tells
    if square > 0 and len(x) > 3:
        left = y - matrix @ fit
        variance = float(left @ left) / (len(x) - 3)
        covariance = variance * np.linalg.inv(matrix.T @ matrix)
        gradient = np.array([slope / (2 * square**2), -1 / (2 * square), 0.0])
        error = max(error, math.sqrt(float(gradient @ covariance @ gradient)))
    return points[lowest][0] + place, error
