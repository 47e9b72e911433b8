"""What is compared between the run that saved a checkpoint and the recipe that continues it."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolkit.errors import CheckpointError
from toolkit.optimizers.base import MOMENTS
from toolkit.recipe.schema import Recipe
from toolkit.run.changes import shown
from toolkit.text.dotted import get

COMPARED = (
    "training.global_batch_size",
    "training.sequence_length",
    "training.precision",
    "optimizer.learning_rate",
    "optimizer.weight_decay",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.clip_grad_norm",
    "schedule.name",
)
"""Settings of the recipe. A format states some of them; the note about the others follows."""
_STATES = {*MOMENTS, "step", "master_param"}
"""What AdamW keeps of a parameter, in torch, DeepSpeed and Transformer Engine."""


class OptimizerGroup(NamedTuple):
    """A group of torch's optimizer."""

    names: Collection[str]
    """Its parameters, by transformers' names; empty if the checkpoint does not name them."""
    options: Mapping[str, Any]


def differences(settings: Mapping[str, object], recipe: Recipe) -> Iterator[str]:
    """The settings of `COMPARED` that differ, and those that the checkpoint does not state."""
    assert settings.keys() <= {*COMPARED}, settings
    ours = recipe.model_dump(mode="json")
    for key in COMPARED:
        if key in settings and (mine := get(ours, key)) != settings[key]:
            yield f"{key} was {shown(settings[key])}, the recipe's {shown(mine)} applies"
    if unknown := [key for key in COMPARED if key not in settings]:
        yield f"not stated by the checkpoint, so not compared: {', '.join(unknown)}"


def group_settings(groups: Iterable[OptimizerGroup]) -> dict[str, object]:
    """What an optimizer was configured with, by the recipe's keys, as far as its groups say.

    A schedule changes `lr`; `initial_lr`, which torch's schedules keep, is the highest rate.
    """
    found: dict[str, object] = {}
    for _, group in groups:
        for key in ("betas", "eps"):
            if key in group:
                value = [*group[key]] if key == "betas" else group[key]
                found.setdefault(f"optimizer.{key}", value)
        rate = group.get("initial_lr", group.get("lr"))
        for key, number in (
            ("learning_rate", rate),
            ("weight_decay", group.get("weight_decay")),
        ):
            if isinstance(number, float | int):
                before: Any = found.get(f"optimizer.{key}", number)
                found[f"optimizer.{key}"] = max(before, number)
    return found


def group_notes(
    groups: Iterable[OptimizerGroup], shapes: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """Differences between groups that those of a recipe do not have."""
    rates: set[object] = set()
    decays: dict[bool, set[float]] = {True: set(), False: set()}
    for names, group in groups:
        rates.add(group.get("initial_lr", group.get("lr")))
        for name in names:
            decays[len(shapes.get(name, ())) > 1].add(group.get("weight_decay", 0.0))
    if others := decays[False] - {0.0}:
        yield (
            f"norms and biases had a weight decay of {_listed(others)}, in a run of the recipe "
            "they have none"
        )
    for what, values, key in (
        ("matrices had weight decays", decays[True], "weight_decay"),
        ("groups had learning rates", rates, "learning_rate"),
    ):
        if len(values) > 1:
            yield (
                f"{what} of {_listed(values)}, in a run of the recipe all have optimizer.{key}"
            )


def _listed(numbers: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, numbers)))


def require_adamw(
    groups: Iterable[OptimizerGroup] = (), states: Iterable[Collection[str]] = ()
) -> None:
    """Raise CheckpointError unless torch's groups, and the names of a parameter's states, are
    those of plain AdamW."""
    for state in states:
        if not {*MOMENTS} <= {*state} <= _STATES:
            raise other_optimizer(f"keeps {', '.join(sorted(state))}")
    for _, group in groups:
        # RAdam keeps the same states and has all flags of AdamW but this one.
        if "decoupled_weight_decay" in group and "amsgrad" not in group:
            raise other_optimizer("has the settings of RAdam")
        for flag in ("amsgrad", "maximize"):
            if group.get(flag):
                raise other_optimizer(f"is used with {flag}")
        if not group.get("bias_correction", True):
            raise other_optimizer("is used without bias correction")
        if not group.get("decoupled_weight_decay", True) and group.get("weight_decay"):
            raise other_optimizer("is Adam, whose weight decay is an L2 term of the gradient")


def other_optimizer(what: str) -> CheckpointError:
    """The error for another optimizer, of which `what` is seen."""
    return CheckpointError(
        f"its optimizer {what}: only plain AdamW's states are read",
        fix="another optimizer's weights are a start, with model.init: pretrained",
    )
