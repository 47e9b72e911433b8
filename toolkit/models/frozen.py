"""Frozen parameters: those that the patterns of `model.freeze` match.

Patterns are matched with the names of a Hugging Face checkpoint. A tied head has no name: it is
the embedding. Nothing here imports torch.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeVar

from toolkit.errors import Problem, RecipeError
from toolkit.models.families import MegatronModel, mapped, model_spec
from toolkit.models.families.base import Instance
from toolkit.models.spec import FrozenParameters, ModelSpec
from toolkit.text.suggest import did_you_mean

if TYPE_CHECKING:
    from torch import nn

KEY = "model.freeze"
Value = TypeVar("Value")
_STACKED = re.compile(r"(.*\.(?:mlp|feed_forward|block_sparse_moe)\.experts)\.\d+\.(.+)")
"""Tensors of one expert, which transformers keeps in one parameter for all experts."""


def matching(patterns: Sequence[str], names: Iterable[str]) -> frozenset[str]:
    """The names that any of the patterns matches."""
    return frozenset(n for n in names if any(fnmatchcase(n, pattern) for pattern in patterns))


def problems(patterns: Sequence[str], names: Collection[str]) -> Iterator[Problem]:
    """What is wrong with the patterns for a model with these tensors."""
    if idle := idle_problem(KEY, patterns, names):
        yield idle
    elif patterns and len(matching(patterns, names)) == len(names):
        found = f"{', '.join(patterns)}, which matches all {len(names):,} tensors"
        yield Problem(KEY, found, "at least one tensor that trains", "freeze fewer")


def idle_problem(
    key: str, patterns: Sequence[str], names: Collection[str], kind: str = "tensor"
) -> Problem | None:
    """The problem of the setting `key` whose patterns all have to match one of `names`."""
    idle = [pattern for pattern in patterns if not matching([pattern], names)]
    if not idle:
        return None
    listed = "model.safetensors.index.json of the model lists the names"
    fix = did_you_mean(idle[0], names, listed, cutoff=0.8)
    allowed = f"patterns of its tensors' names, e.g. {min(names)}"
    return Problem(key, f"{', '.join(idle)}, which matches no {kind}", allowed, fix)


def mixed_problems(
    key: str, value_of: Callable[[str], Value], parameters: Iterable[Collection[str]]
) -> Iterator[Problem]:
    """The first parameter, given by its checkpoint tensors, to whose tensors the patterns of
    the setting `key` give different values."""
    for tensors in parameters:
        found = {value_of(tensor): tensor for tensor in sorted(tensors, reverse=True)}
        if len(found) > 1:
            one, other, *_ = sorted(found.values())
            listed = ", ".join(sorted(tensors)[:4])
            yield Problem(
                key,
                f"different values for {one} and {other}",
                "one value: this model implementation keeps both in one parameter",
                f"match all or none of {listed}",
            )
            return


def value_of_parameter(
    key: str, value_of: Callable[[str], Value], tensors: Collection[str]
) -> Value:
    """The value that the setting `key` gives the parameter of these tensors. Raises RecipeError
    if they have different ones, which a plan does not see in every type of model."""
    if found := [*mixed_problems(key, value_of, [tensors])]:
        raise RecipeError(found)
    return value_of(min(tensors))


def freeze(
    parameters: Iterable[tuple["nn.Parameter", Collection[str]]], frozen: frozenset[str]
) -> None:
    """Freeze the parameters, each given with its tensors, that consist of `frozen` ones."""
    for parameter, tensors in parameters:
        if value_of_parameter(KEY, frozen.__contains__, tensors):
            parameter.requires_grad_(False)


def fused(model: MegatronModel) -> list[frozenset[str]]:
    """The tensors that each parameter of the megatron-core model is made of."""
    return [_tensors_of(instance) for instance in model.instances()]


def stacked(config: Mapping[str, object]) -> list[set[str]]:
    """The tensors of each parameter in which transformers keeps several: a layer's experts."""
    found: dict[str, set[str]] = {}
    for name in names_of(config):
        if match := _STACKED.fullmatch(name):
            kind = re.sub("^(gate|up)_proj", "gate_up_proj", match[2])
            found.setdefault(f"{match[1]}.{kind}", set()).add(name)
    return list(found.values())


def names_of(config: Mapping[str, object]) -> frozenset[str]:
    """The tensors of a checkpoint of the model."""
    return frozenset[str]().union(*fused(mapped(config)))


def _tensors_of(instance: Instance) -> frozenset[str]:
    numbers = {"layer": instance.layer, "expert": instance.expert}
    rows = (part for stack in instance.tensor.stacks for part in stack)
    return frozenset(name.format(**numbers) for name in {part.tensor for part in rows})


def spec_of(config: Mapping[str, object], patterns: Sequence[str]) -> ModelSpec:
    """The model's shape, with what `patterns` freeze of it."""
    spec = model_spec(config)
    return replace(spec, frozen=_counted(config, patterns, spec)) if patterns else spec


def _counted(
    config: Mapping[str, object], patterns: Sequence[str], spec: ModelSpec
) -> FrozenParameters:
    """Elements that do not train, by part. Each row as its own checkpoint tensor is."""
    split, whole, experts = ([0] * spec.layers for _ in range(3))
    first = spec.layers
    ends = {"word_embeddings": 0, "position_embeddings": 0, "output_layer": 0, "norm": 0}
    for instance in mapped(config).instances():
        tensor, numbers = instance.tensor, {"layer": instance.layer, "expert": instance.expert}
        rows = [part for stack in tensor.stacks for part in stack]
        still = [one for one in rows if matching(patterns, [one.tensor.format(**numbers)])]
        count = (tensor.columns or 1) * sum(len(one.numbers) for one in still)
        if len(still) < len(rows) and (instance.layer is not None or "embed" in tensor.name):
            first = min(first, instance.layer or 0)
        if instance.layer is None:
            ends[next(part for part in ends if part in tensor.name)] += count
        elif instance.expert is not None:
            experts[instance.layer] += count
        else:
            kind = whole if "norm" in tensor.name or ".router" in tensor.name else split
            kind[instance.layer] += count
    return FrozenParameters(
        embedding=ends["word_embeddings"],
        position_embedding=ends["position_embeddings"],
        lm_head=ends["output_layer"],
        final_norm=ends["norm"],
        layers=tuple(split),
        whole=tuple(whole),
        experts=tuple(experts),
        first_trained=first,
    )
