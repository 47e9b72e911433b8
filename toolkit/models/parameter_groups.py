"""Learning rates and weight decay by parameter: `optimizer.groups`.

Patterns are matched as those of `model.freeze` are (`toolkit.models.frozen`). Nothing here
imports torch.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from toolkit.errors import Problem
from toolkit.models.frozen import idle_problem, matching, value_of_parameter
from toolkit.recipe.schema import ParameterGroup

KEY = "optimizer.groups"


class Multipliers(NamedTuple):
    """Multipliers of learning rate and weight decay."""

    lr: float = 1.0
    wd: float = 1.0


def multipliers(groups: Sequence[ParameterGroup], tensors: Collection[str]) -> Multipliers:
    """Multipliers of the parameter of these checkpoint tensors, which is updated as a whole."""
    return value_of_parameter(KEY, partial(of_tensor, groups), tensors)


def of_tensor(groups: Sequence[ParameterGroup], tensor: str) -> Multipliers:
    """Multipliers of the first group that matches a tensor's name."""
    for group in groups:
        if matching(group.parameters, [tensor]):
            return Multipliers(group.lr_mult, group.wd_mult)
    return Multipliers()


def problems(groups: Sequence[ParameterGroup], trained: Collection[str]) -> Iterator[Problem]:
    """What is wrong with the groups of a model that trains these checkpoint tensors."""
    left = frozenset(trained)
    for index, group in enumerate(groups):
        key = f"{KEY}[{index}].parameters"
        kind = "tensor that trains"
        if idle := idle_problem(key, group.parameters, trained, kind):
            yield idle
        elif matching(group.parameters, left):
            left -= matching(group.parameters, left)
        else:
            found = f"{', '.join(group.parameters)}, which earlier groups match completely"
            allowed = "patterns of a tensor that is in no earlier group"
            yield Problem(key, found, allowed, "put this group before them, or remove it")


def in_small_model(
    groups: Sequence[ParameterGroup], trained: Collection[str]
) -> tuple[ParameterGroup, ...]:
    """The groups that suit a smaller model, which trains these tensors: with the patterns that
    match any of its tensors, and without groups that earlier ones match completely."""
    kept, left = [], frozenset(trained)
    for group in groups:
        patterns = tuple(p for p in group.parameters if matching([p], trained))
        if own := matching(patterns, left):
            kept.append(group.model_copy(update={"parameters": patterns}))
            left -= own
    return tuple(kept)
