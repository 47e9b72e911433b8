"""The reference's definitions of the objectives against those that the engines minimise."""

from typing import Any

import pytest
import torch

from tests.engines.cases import Case, recipe
from toolkit.batch import MicroBatch
from toolkit.models.log_probs import label_log_probs
from toolkit.objectives.preference import REFERENCE
from toolkit.recipe.schema import Recipe
from toolkit.rehearse.batches import global_batch
from toolkit.rehearse.losses import DEFINED, mean_loss, rehearsed_objective, row_log_probs

VOCABULARY = 31
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("pretrain", {}),
    ("sft", {}),
    ("dpo", {}),
    ("dpo", {"loss": "sigmoid", "beta": 0.4, "label_smoothing": 0.1, "sft_weight": 0.5}),
    ("dpo", {"loss": "ipo", "beta": 0.3}),
    ("dpo", {"loss": "hinge", "beta": 0.02}),
    ("orpo", {"beta": 0.5}),
]


def with_objective(name: str, settings: dict[str, Any]) -> Recipe:
    plain = recipe(Case("ddp", 2), 1).model_dump(mode="json")
    plain["training"]["objective"] = name
    return Recipe.model_validate(plain | ({name: settings} if settings else {}))


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_both_definitions_agree(name: str, settings: dict[str, Any]) -> None:
    wanted = with_objective(name, settings)
    inputs, labels = global_batch(wanted.training, VOCABULARY, 0)
    assert len(inputs) == 8 * (2 if name in ("dpo", "orpo") else 1)
    generator = torch.Generator().manual_seed(1)
    first, now = torch.randn(2, *labels.shape, VOCABULARY, generator=generator)
    now.requires_grad_()
    reference = row_log_probs(first, labels)
    expected = mean_loss(wanted, now, labels, reference)

    batch = MicroBatch(inputs, labels, extra={REFERENCE: reference})
    objective = wanted.objective()
    found = objective.loss(label_log_probs(now, labels), batch).loss / objective.count(batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = (torch.autograd.grad(loss, now)[0] for loss in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-8)


def test_another_objective_is_rehearsed_by_the_one_for_its_data() -> None:
    assert [rehearsed_objective(with_objective(name, {})) for name in DEFINED] == [*DEFINED]
