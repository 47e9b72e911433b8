"""`optimizer.groups`: what patterns match, what is refused, what a small model keeps."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.plan.making import TINY, intent, recipe
from toolkit.engines.adamw import moments, parameter_groups
from toolkit.models.adapters.lora import trained_tensors
from toolkit.models.parameter_groups import (
    in_small_model,
    multipliers,
)
from toolkit.optimizers.base import ADAMW
from toolkit.plan.planner import plan_recipe
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules.models import problems
from toolkit.recipe.schema import AdapterSection, OptimizerSection, ParameterGroup, Recipe
from toolkit.rehearse.rehearsal import Options, prepare

MIXTRAL = TINY | {"model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 4}


def group(*patterns: str, lr: float = 0.5, wd: float = 0.5) -> ParameterGroup:
    return ParameterGroup(parameters=patterns, lr_mult=lr, wd_mult=wd)


def grouping(
    *groups: ParameterGroup, config: dict[str, Any] = TINY, freeze: tuple[str, ...] = (),
    adapter: dict[str, Any] | None = None, **parallel: Any,
) -> Recipe:  # fmt: skip
    found = recipe(model__config=config, model__freeze=list(freeze))
    section = found.optimizer.model_copy(update={"groups": groups})
    adapters = AdapterSection(**adapter) if adapter else None
    update = {"parallel": intent(**parallel), "optimizer": section, "adapter": adapters}
    return found.model_copy(update=update)


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (grouping(group("model.*"), group("model.embed_token.*")), "groups[1].parameters"),
        (grouping(group("model.embed_token.weight")), "mean `model.embed_tokens.weight`"),
        (grouping(group("*.bias")), "*.bias, which matches no tensor that trains"),
        (grouping(group("*.norm.*"), freeze=("model.norm.*",)), "matches no tensor"),
        (grouping(group("model.*"), group("*.mlp.*")), "which earlier groups match completely"),
        (
            grouping(group("*.0.self_attn.q_proj.*"), engine="megatron"),
            "different values for model.layers.0.self_attn.k_proj.weight and "
            "model.layers.0.self_attn.q_proj.weight",
        ),
        (
            grouping(group("model.embed*"), adapter={"rank": 2, "alpha": 2}),
            "e.g. model.layers.0.mlp.down_proj.lora_A.weight",
        ),
        (
            grouping(
                group("*.q_proj.lora_A.*"), adapter={"rank": 2, "alpha": 2}, engine="megatron"
            ),
            "different values for",
        ),
    ],
)  # fmt: skip
def test_refused(wanted: Recipe, told: str) -> None:
    assert wanted.model.config is not None
    (problem,) = problems(PlanRequest.of(wanted, wanted.cluster, wanted.model.config))
    assert told in str(problem)


def test_a_part_of_a_parameter_rules_out_only_who_keeps_it_whole() -> None:
    assert plan_recipe(grouping(group("*.q_proj.*"))).model == "hf"
    assert plan_recipe(grouping(group("*.experts.1.*"), config=MIXTRAL)).model == "megatron"
    same = group("*.q_proj.*"), group("*.k_proj.*", "*.v_proj.*")
    assert plan_recipe(grouping(*same, engine="megatron")).model == "megatron"


def test_the_first_group_that_matches() -> None:
    groups = group("a.*", lr=2.0), group("*", lr=3.0)
    assert [multipliers(groups, {name}).lr for name in ("a.b", "b.a")] == [2.0, 3.0]
    assert multipliers(groups[:1], {"b.a"}) == (1.0, 1.0)


def test_norms_and_biases_never_decay() -> None:
    settings = OptimizerSection(learning_rate=1.0, weight_decay=0.1, groups=(group("a", wd=9),))
    layer = nn.Linear(2, 2)
    found = parameter_groups([(layer.weight, {"a"}), (layer.bias, {"a"})], settings)
    assert [one["weight_decay"] for one in found] == [pytest.approx(0.9), 0.0]
    assert [one["lr_mult"] for one in found] == [0.5, 0.5]


def test_a_small_model_has_the_groups_that_suit_it() -> None:
    groups = group("model.layers.30.*"), group("*.1.*", "*.31.*"), group("*.layers.1.*")
    names = trained_tensors(TINY, (), None)
    assert in_small_model(groups, names) == (group("*.1.*"),)
    (small,) = prepare(grouping(group("*.1.*", lr=4.0)), Options()).recipe.optimizer.groups
    assert small.lr_mult == 4.0
    assert (
        prepare(grouping(small), Options()).recipe.optimizer.learning_rate
        <= ADAMW.largest_rate / 4
    )


def test_moments_have_the_names_of_checkpoints() -> None:
    """Which engines that save and load by the same function would not notice."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 3.0)
    optimizer = torch.optim.AdamW([weight], betas=(0.9, 0.99))
    optimizer.step()
    found = moments(optimizer, weight)
    assert found["weight"] is weight
    assert found["exp_avg"].tolist() == pytest.approx([0.1 * 3.0] * 2)
    assert found["exp_avg_sq"].tolist() == pytest.approx([0.01 * 3.0**2] * 2)
