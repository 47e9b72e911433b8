"""Which layout is measured next: the best of every strategy, then what differs little from the
fastest so far.

Predicted times rank variants of one strategy better than strategies of different engines, so
each strategy is measured once, and the rest of the budget is spent near the fastest.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from toolkit.plan.dimensions import settings
from toolkit.plan.search import Candidate, Search


def settings_of(candidate: Candidate) -> dict[str, Any]:
    """What a recipe states that asks for this layout: values by dotted setting."""
    engine, model = candidate.pair
    found = settings(candidate.layout) | {"parallel.engine": engine, "parallel.model": model}
    return {key: [*one] if isinstance(one, tuple) else one for key, one in found.items()}


def key_of(values: Mapping[str, Any]) -> str:
    """The key of a layout's settings, the same after they were written and read as JSON."""
    return json.dumps(values, sort_keys=True)


def differences(first: Candidate, second: Candidate) -> int:
    """How many decisions differ, engine and model together counted once."""
    mine, theirs = settings(first.layout), settings(second.layout)
    differing = [key for key in mine if mine[key] != theirs[key]]
    return len(differing) + (first.pair != second.pair)


@dataclass(frozen=True)
class Candidates:
    """The layouts that fit, and the order in which they are measured."""

    search: Search
    most: int
    """How many are measured."""

    @cached_property
    def by_key(self) -> dict[str, Candidate]:
        """Every layout that fits, best predicted first."""
        return {key_of(settings_of(one)): one for one in self.search.fitting}

    def following(self, times: Mapping[str, float | None]) -> Candidate | None:
        """The next one to measure; None when enough were, or all.

        `times`: seconds per step of those that were tried, None for one that failed.
        """
        if len(times) >= self.most:
            return None
        open_ = [one for key, one in self.by_key.items() if key not in times]
        strategies = self.search.strategies(max(1, self.most // 2))
        measured = {
            key: time for key, time in times.items() if time is not None and key in self.by_key
        }
        near: list[Candidate] = []
        if measured:
            fastest = self.by_key[min(measured, key=measured.__getitem__)]
            near = [one for one in open_ if differences(one, fastest) == 1]
        return _first(open_, strategies) or _first(open_, near) or _first(open_, open_)

    def expected(self) -> list[Candidate]:
        """Those that are measured if every prediction is right, in order."""
        found: dict[str, Candidate] = {}
        times: dict[str, float | None] = {}
        while candidate := self.following(times):
            key = key_of(settings_of(candidate))
            found[key], times[key] = candidate, candidate.step_s
        return [*found.values()]


def _first(open_: Sequence[Candidate], preferred: Sequence[Candidate]) -> Candidate | None:
    return next((one for one in preferred if one in open_), None)
