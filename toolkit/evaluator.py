"""The light half of each evaluator: what judges a model's exported weights.

Schema, checks, doctor, training and `dmt eval` use an `Evaluator` and compare no names. The
heavy half is a function that a process of its own calls (evaluate/process.py). The recipe's
schema imports the light half for its section: where it is defined, `toolkit.recipe.schema` can
be imported only inside of functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import create_model

from toolkit.recipe.section import Positive, Section
from toolkit.registry import Registry


class EvaluatorSection(Section):
    """When an evaluator of the recipe runs."""

    every_steps: Positive | None = None
    """Steps between two; null: as `evaluation.every_steps`. Always once more at the end."""

    @property
    def can_lack_something(self) -> bool:
        """Whether `Evaluator.prepare` could find that something is missing."""
        return True


AnySection = TypeVar("AnySection", bound=type[Section])


@dataclass(frozen=True)
class Evaluator:
    """One way to judge the weights in a Hugging Face folder."""

    name: str
    section: type[EvaluatorSection]
    """Its settings, a recipe's `evaluation.NAME`."""
    evaluate: str
    """`module:function` of (folder: Path, settings, device: str): its findings, in JSON's
    types. The device is `cpu` or `cuda`, all GPUs that are visible."""
    prepare: str
    """`module:function` of (folder, settings): raises the DmtError that `evaluate` would raise,
    as far as that is known without weights. The folder has config and tokenizer."""
    event: str
    """Kind of the events that report it."""
    extra: str = ""
    """The extra of the distribution with its packages."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Distributions that it needs, and the module of each."""


EVALUATORS: Registry[Evaluator] = Registry(
    "dmt.evaluators",
    {
        "tasks": "toolkit.evaluate.tasks:TASKS",
        "samples": "toolkit.evaluate.samples:SAMPLES",
    },
)
"""Every evaluator by its name; other packages add theirs as entry points."""


def with_evaluators(section: AnySection) -> AnySection:
    """Add the sections of all evaluators to the recipe's `evaluation`."""
    keys: Any = {one.name: (one.section | None, None) for one in EVALUATORS.values()}
    added = create_model("Evaluators", __base__=Section, **keys).model_fields
    section.__pydantic_fields__ = {**section.__pydantic_fields__, **added}
    section.model_rebuild(force=True)
    return section


def chosen(evaluation: Section) -> dict[str, EvaluatorSection]:
    """The settings of the evaluators that a recipe's `evaluation` turns on, by name."""
    found = ((name, getattr(evaluation, name)) for name in EVALUATORS.names)
    return {name: settings for name, settings in found if settings is not None}
