"""Objectives with the settings of their sections, and what sections do not go together."""

from typing import Any

import pytest

from tests.engines.cases import Case, recipe
from toolkit.intake.checks import broken_rules
from toolkit.objectives.preference import Dpo, Orpo
from toolkit.recipe.schema import Recipe


def with_objective(name: str, **sections: Any) -> Recipe:
    plain = recipe(Case("ddp", 2), 1).model_dump(mode="json")
    plain["training"]["objective"] = name
    return Recipe.model_validate(plain | sections)


def problems(wanted: Recipe) -> list[str]:
    """Keys, but for the data, which are text."""
    found = [problem.key for problem in broken_rules(wanted)]
    return [key for key in found if key != "data.train.kind"]


def test_settings_reach_the_objective() -> None:
    settings = {"loss": "ipo", "beta": 0.7, "label_smoothing": 0.0, "sft_weight": 0.5}
    made = with_objective("dpo", dpo=settings).objective()
    assert isinstance(made, Dpo) and vars(made) == vars(Dpo(**settings))
    other = with_objective("orpo", orpo={"beta": 0.3}).objective()
    assert isinstance(other, Orpo) and vars(other) == vars(Orpo(beta=0.3))


@pytest.mark.parametrize("name", ["pretrain", "sft", "dpo", "orpo"])
def test_defaults_of_section_and_objective_are_the_same(name: str) -> None:
    stated = with_objective(name, **({name: {}} if name in ("dpo", "orpo") else {}))
    assert vars(stated.objective()) == vars(with_objective(name).objective())
    assert problems(stated) == []


def test_what_does_not_go_together() -> None:
    assert problems(with_objective("dpo", orpo={})) == ["orpo"]
    assert problems(with_objective("pretrain", dpo={}, orpo={})) == ["dpo", "orpo"]
    smoothed = with_objective("dpo", dpo={"loss": "hinge", "label_smoothing": 0.1})
    assert problems(smoothed) == ["dpo.label_smoothing"]


def test_a_sample_of_pairs_is_two_rows() -> None:
    pretrain, dpo = with_objective("pretrain"), with_objective("dpo")
    assert dpo.training.batches.tokens(1) == 2 * pretrain.training.batches.tokens(1)
    counted = {"steps": None, "tokens": 1024}
    steps = [one.training.model_copy(update=counted).total_steps() for one in (pretrain, dpo)]
    assert steps == [8, 4]
