"""Learning rates and weight decay by parameter: `optimizer.groups` and `optimizer.layer_decay`.

Patterns are matched as those of `model.freeze` are (`toolkit.models.frozen`). Nothing here
imports torch.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from toolkit.errors import Problem, RecipeError
from toolkit.models.frozen import idle_problem, matching
from toolkit.optimizers.tensors import LAYER, is_embedding
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


def layer_count(tensors: Iterable[str]) -> int:
    """Decoder layers of a model with these tensors, or of its part on this rank."""
    found = (LAYER.search(tensor) for tensor in tensors)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def decay_problems(tensors: Iterable[str]) -> Iterator[Problem]:
    """Why `layer_decay` does not suit a model with these tensors: it needs one order of
    layers."""
    found = ((tensor, LAYER.search(tensor)) for tensor in tensors)
    stacks = sorted({tensor[: match.start()] for tensor, match in found if match})
    if len(stacks) > 1:
        yield Problem(
            "optimizer.layer_decay",
            f"layers in {', '.join(stacks)}",
            "null for a model whose layers are not in one list: no order of them is defined",
            "remove optimizer.layer_decay, and state the rates in optimizer.groups",
        )


def layer_multiplier(decay: float, tensor: str, layers: int) -> float:
    """The factor of `layer_decay` for a tensor's learning rate: decay^(layers + 1 - depth).

    Depths are those of BEiT's and MAE's fine-tuning (arXiv:2106.08254, arXiv:2111.06377):
    embeddings 0, the first decoder layer 1, the last `layers`; final norm and head one more.
    """
    match = LAYER.search(tensor)
    depth = int(match[1]) + 1 if match else 0 if is_embedding(tensor) else layers + 1
    return float(decay ** (layers + 1 - depth))


def _of(groups: Sequence[ParameterGroup], tensor: str) -> Multipliers:
    """Those of the first group that matches a tensor's name."""
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
