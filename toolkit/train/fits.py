"""Reports what a resumed run keeps of a checkpoint, before it starts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

from toolkit.adapters.lora import lora_of
from toolkit.checkpoint.checkpoints import CheckpointFolder
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import stored_shape
from toolkit.models import huggingface as hf
from toolkit.models.config_keys import is_dropout
from toolkit.models.hub import model_config
from toolkit.plan.dimensions import layout_text
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import (
    LENGTH_SETTINGS,
    ModelSection,
    Recipe,
    ScheduleSection,
    TrainingSection,
)
from toolkit.run import jsonl
from toolkit.run.assignment import Assignment
from toolkit.run.changes import changes, may_change, shown
from toolkit.run.environment import environment_report
from toolkit.train.schedule import learning_rate

Verdict = Literal["kept", "changed", "refused"]
Part = tuple[Verdict, str]
"""Of the state: its verdict, and why."""
Shapes = Mapping[str, tuple[int, ...]]

_CURSOR = (
    "data",
    "training.sequence_length",
    "training.global_batch_size",
    "training.batch_ramp",
    "training.seed",
)
"""Settings that decide which sequence comes next."""
_DISTRIBUTION = ("parallel", "cluster", "launch", "training.micro_batch_size")
"""Intent that the plan turned into a layout, by which it is compared."""


class StateRow(NamedTuple):
    """One part of a run's state."""

    what: str
    verdict: Verdict
    """`kept`: continues unchanged; `changed`: continues with a difference; `refused`: this
    recipe cannot continue the run."""
    why: str


@dataclass(frozen=True)
class Pairing:
    """A checkpoint and the run that would continue from it."""

    manifest: Manifest
    saved: Shapes
    """Tensors of the checkpoint."""
    recipe: Recipe
    plan: Plan
    wanted: Shapes
    """Tensors of the recipe's model, by their names in a checkpoint."""

    def rows(self) -> list[StateRow]:
        """Every part of the state, the weights first."""
        settings = _Settings.of(self.manifest.recipe, self.recipe)
        settings.take(*_DISTRIBUTION, free=True)  # reported as layouts
        length = settings.take(*LENGTH_SETTINGS, free=True)
        parts = {
            "weights and moments": self._weights(settings.take("model", "adapter")),
            "step and schedule": self._schedule(length, settings.take("optimizer", "schedule")),
            "data cursor": self._cursor(settings.take(*_CURSOR)),
            "precision": _unless(
                settings.take("training.precision"), self.recipe.training.precision
            ),
            "loss scale": self._loss_scale(),
            "random streams": self._random_streams(),
            "layout": self._layout(),
            "versions": self._versions(),
            "W&B run": self._wandb(),
        }
        rows = [StateRow(what, *part) for what, part in parts.items()]
        return [*rows, *_other_settings(settings.rest()), *self._resume()]

    def _weights(self, changed: Sequence[str]) -> Part:
        count = sum(map(prod, self.saved.values()))
        kept = f"{len(self.saved):,} tensors, {count:,} parameters, in fp32"
        return _unless([*shape_problems(self.saved, self.wanted), *changed], kept)

    def _schedule(self, length: Sequence[str], changed: Sequence[str]) -> Part:
        if changed:
            return _unless(changed, "")
        step, total = self.manifest.step, self.recipe.total_steps()
        if total is None:
            detail = f"continues after step {step:,} of {self.recipe.training.epochs:g} epochs"
            return "changed" if length else "kept", "; ".join([detail, *length])
        if step >= total:
            return "changed", f"all {total:,} steps are done: nothing is left to train"
        detail = f"continues after step {step:,} of {total:,}"
        if not length:
            return "kept", detail
        return "changed", "; ".join([detail, *length, *self._rates(total)])

    def _rates(self, total: int) -> Iterator[str]:
        """Schedules for which another length of the run changes the learning rate."""
        step, optimizer = self.manifest.step, self.recipe.optimizer
        training = TrainingSection(**self.manifest.recipe["training"])
        before = self.manifest.lengths.total_steps(training)
        schedule = ScheduleSection(**self.manifest.recipe["schedule"])
        if before is None or step >= before:
            return
        was, now = (
            learning_rate(step, steps, optimizer.learning_rate, schedule)
            for steps in (before, total)
        )
        if was != now:
            yield f"next learning rate {now:.3g}, not {was:.3g}"

    def _cursor(self, changed: Sequence[str]) -> Part:
        consumed = self.manifest.consumed_samples
        detail = f"continues after {consumed:,} samples; a launch compares the data itself"
        return _unless(changed, detail)

    def _loss_scale(self) -> Part:
        if self.recipe.training.precision != "fp16":
            return "kept", "none: only fp16 has one"
        if self.manifest.loss_scale is None:
            return "changed", "none was saved: the scaler starts again"
        scale = self.manifest.loss_scale
        return "kept", ", ".join(f"{key} {value}" for key, value in scale.items())

    def _random_streams(self) -> Part:
        config = self.recipe.model.config or {}
        drawn = [f"{key} {config[key]:g}" for key in config if is_dropout(key) and config[key]]
        if self.recipe.adapter is not None and self.recipe.adapter.dropout:
            drawn.append(f"adapter.dropout {self.recipe.adapter.dropout:g}")
        if not drawn:
            return "kept", "no dropout: a step draws no random numbers"
        detail = f"{', '.join(drawn)}: drawn from seed, step and rank"
        if self._same_layout:
            return "kept", detail
        return "changed", f"{detail}, and another layout has other ranks"

    @property
    def _same_layout(self) -> bool:
        then, now = self.manifest, self.plan
        return (then.engine, then.model, then.layout) == (now.engine, now.model, now.layout)

    def _layout(self) -> Part:
        then = layout_text(self.manifest.engine, self.manifest.model, self.manifest.layout)
        if self._same_layout:
            return "kept", f"{then}: bitwise the uninterrupted run"
        now = layout_text(self.plan.engine, self.plan.model, self.plan.layout)
        return "changed", f"{then} then, {now} now: the same up to the rounding of sums"

    def _versions(self) -> Part:
        then, now = (_packages(one) for one in (self.manifest.versions, environment_report()))
        changed = [
            f"{name} {then.get(name) or 'absent'} then, {now.get(name) or 'absent'} now"
            for name in sorted(then.keys() | now.keys())
            if then.get(name) != now.get(name)
        ]
        if changed:
            return "changed", "; ".join(changed)
        return "kept", "the same packages as on this machine"

    def _wandb(self) -> Part:
        wandb, run_id = self.recipe.logging.wandb, self.manifest.wandb_id
        if wandb is None or wandb.mode == "disabled":
            return "kept", "the recipe logs to none"
        if run_id is None:
            return "changed", "none was saved: the run directory's, or a new one"
        return "kept", run_id

    def _resume(self) -> Iterator[StateRow]:
        if self.recipe.checkpoint.resume == "never":
            yield StateRow("resume", "refused", "checkpoint.resume is never: set it to auto")


def _unless(problems: Sequence[str], kept: str) -> Part:
    """Refused because of these problems; without any, kept as stated."""
    return ("refused", "; ".join(problems)) if problems else ("kept", kept)


def compare(found: CheckpointFolder, assignment: Assignment) -> list[StateRow]:
    """What a run would keep of a checkpoint. Raises CheckpointError if the tensors cannot be
    read."""
    recipe = assignment.recipe
    config = hf.build_config(ModelSection(config=model_config(recipe.model)))
    lora = lora_of(recipe.adapter, config.to_dict())
    return Pairing(
        found.manifest,
        SavedState(found.folder).shapes,
        recipe,
        assignment.plan,
        hf.checkpoint_shapes(config) if lora is None else lora.shapes,
    ).rows()


def shape_problems(saved: Shapes, wanted: Shapes) -> Iterator[str]:
    """How the tensors of a checkpoint differ from those of a model; empty when they agree."""
    both = saved.keys() & wanted.keys()
    other = sorted(name for name in both if saved[name] != stored_shape(wanted[name]))
    if other:
        first = other[0]
        yield (
            f"{_count(other)} of another shape: {first} is {list(saved[first])} in the "
            f"checkpoint, {list(wanted[first])} in the recipe's model"
        )
    if new := sorted(wanted.keys() - saved.keys()):
        yield f"{_count(new)} not in the checkpoint: {_named(new)}"
    if gone := sorted(saved.keys() - wanted.keys()):
        yield f"{_count(gone)} not in the recipe's model: {_named(gone)}"


def _count(names: Sequence[str]) -> str:
    return "1 tensor is" if len(names) == 1 else f"{len(names):,} tensors are"


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}, …"


def _packages(versions: Mapping[str, Any]) -> dict[str, str | None]:
    return {"dmt": versions.get("dmt"), **versions.get("packages", {})}


class _Settings:
    """Settings that differ, each reported once, in the row that it belongs to."""

    def __init__(self, changed: dict[str, str]) -> None:
        self._left = changed

    @classmethod
    def of(cls, saved: Mapping[str, Any], recipe: Recipe) -> "_Settings":
        """Compare as a manifest stores recipes: plain and without secrets."""
        now = jsonl.plain(recipe.model_dump(mode="json"))
        return cls(
            {
                key: f"{key}: {shown(old)} then, {shown(new)} now"
                for key, old, new in changes(saved, now)
            }
        )

    def take(self, *sections: str, free: bool = False) -> list[str]:
        """The differences in some sections; they are not reported again.

        `free`: those that a resumed run may have, otherwise those that it may not have.
        """
        keys = [
            key
            for key in self._left
            if any(key == one or key.startswith(f"{one}.") for one in sections)
            and may_change(key) is free
        ]
        return [self._left.pop(key) for key in keys]

    def rest(self) -> dict[str, str]:
        """Differences that no row has reported."""
        return self._left


def _other_settings(left: Mapping[str, str]) -> Iterator[StateRow]:
    changed = [text for key, text in left.items() if may_change(key)]
    if refused := [text for key, text in left.items() if not may_change(key)]:
        yield StateRow("other settings", "refused", "; ".join(refused))
    if changed:
        yield StateRow("other settings", "changed", "; ".join(changed))
