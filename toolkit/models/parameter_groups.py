"""Learning rates and weight decay by parameter: `optimizer.groups`.

Patterns are matched as those of `model.freeze` are (`toolkit.models.frozen`). Nothing here
imports torch.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from toolkit.errors import Problem, RecipeError
from toolkit.models.frozen import idle_problem, matching
from toolkit.recipe.schema import ParameterGroup

KEY = "optimizer.groups"


class Multipliers(NamedTuple):
    """Multipliers of learning rate and weight decay."""

    lr: float = 1.0
    wd: float = 1.0


def multipliers(groups: Sequence[ParameterGroup], tensors: Collection[str]) -> Multipliers:
    """Multipliers of the parameter that consists of the checkpoint tensors `tensors`.

    Raises RecipeError if its tensors have different ones: a parameter is updated as a whole.
    """
    if found := [*part_problems(groups, [tensors])]:
        raise RecipeError(found)
    return _of(groups, min(tensors))


def _of(groups: Sequence[ParameterGroup], tensor: str) -> Multipliers:
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


def part_problems(
    groups: Sequence[ParameterGroup], parameters: Iterable[Collection[str]]
) -> Iterator[Problem]:
    """The first parameter, given by its tensors, whose tensors have different multipliers."""
    for tensors in parameters if groups else ():
        found = {_of(groups, tensor): tensor for tensor in sorted(tensors, reverse=True)}
        if len(found) > 1:
            one, other, *_ = sorted(found.values())
            yield Problem(
                KEY,
                f"different multipliers for {one} and {other}",
                "the same for all tensors of a parameter: this model implementation keeps "
                "them in one",
                "match both with one group",
            )
            return


def in_small_model(
    groups: Sequence[ParameterGroup], trained: Collection[str]
) -> tuple[ParameterGroup, ...]:
    """The groups that suit a smaller model, which trains these tensors: with the patterns that
    match any of its tensors, and without groups that earlier ones match completely."""
    kept: list[ParameterGroup] = []
    for group in groups:
        patterns = tuple(p for p in group.parameters if matching([p], trained))
        if patterns:
            kept.append(group.model_copy(update={"parameters": patterns}))
            if any(problems(kept, trained)):
                kept.pop()
    return tuple(kept)
