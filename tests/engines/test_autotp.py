"""DeepSpeed's AutoTP on transformers' models: which types are split, and what is refused."""

from typing import Any

import pytest

from tests.engines.cases import TOLERANCE
from tests.engines.parity_worker import Case, recipe
from tests.forked import call_ranks
from tests.models.every_split import GENERIC, NAMED, config_of, each
from tests.models.every_type import PAGE, with_column
from tests.needs import is_of_ci
from toolkit.backend import BACKENDS
from toolkit.engines.deepspeed import autotp
from toolkit.intake.checks import broken_rules
from toolkit.models.families.generic import model_types
from toolkit.plan.planner import plan_recipe

TYPES = (*NAMED, *GENERIC)
SPLIT = {"model": "hf", "tensor": 2}


def check(jobs: list[tuple[str, int]]) -> None:
    wanted = [(one, config_of(one), stage, None) for one, stage in jobs]
    for found in call_ranks(each, 2, wanted):
        results = dict(zip(jobs, found, strict=True))
        wrong = {job: x for job, x in results.items() if isinstance(x, str) or x > TOLERANCE}
        assert not wrong


@pytest.mark.slow
def test_trains_as_a_plain_loop_does() -> None:
    check([(one, number % 3) for number, one in enumerate(TYPES)])


@pytest.mark.soak
def test_trains_in_every_stage() -> None:
    check([(one, stage) for one in TYPES for stage in (0, 1, 2)])


def test_every_type_is_in_the_table() -> None:
    table = autotp.table()
    if is_of_ci("transformers"):
        assert {*table} == model_types()  # others have more or fewer types, which are refused
    proven = [entry for entry in table.values() if autotp.WHY not in entry]
    assert len(proven) >= 60
    assert all(entry[autotp.DIFFERENCE] <= TOLERANCE for entry in proven)
    page = PAGE.read_text(encoding="utf-8")
    assert with_column(page) == page, "python -m tests.models.every_split writes it"


def test_adapters_are_split_like_their_base() -> None:
    plan = autotp.split_plan("llama")
    layer = "model.layers.3."
    for name, kind in {
        "self_attn.q_proj": autotp.COLUMN,
        "self_attn.q_proj.base_layer": autotp.COLUMN,
        "self_attn.q_proj.lora_B.default": autotp.COLUMN,
        "self_attn.q_proj.lora_A.default": None,
        "mlp.down_proj.lora_A.default": autotp.ROW,
        "mlp.down_proj.lora_B.default": None,
        "input_layernorm": None,
    }.items():
        assert plan.kind_of(layer + name) == kind, name


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"family": {"num_key_value_heads": 1}}, "parallel.tensor", "key/value heads"),
        ({"family": config_of("mixtral")}, "parallel.tensor", "experts"),
        ({"family": config_of("mamba")}, "parallel.tensor", "both attention and MLP"),
        (
            {"family": {"attention_dropout": 0.1}},
            "model.config.attention_dropout",
            "would drop the same",
        ),
        ({"offload": "cpu"}, "parallel.zero.offload_optimizer", "no test runs it"),
        ({"kernels": {"compile": "layers"}}, "kernels.compile", "no test runs it"),
    ],
)
def test_refused_with_the_reason(changes: dict[str, Any], key: str, words: str) -> None:
    case = Case("deepspeed", 2, **{"stage": 2, "parallel": SPLIT, **changes})
    problems = [*broken_rules(recipe(case, 4))]
    assert [problem.key for problem in problems] == [key]
    assert words in f"{problems[0].allowed} {problems[0].found}"


def test_auto_does_not_choose_it() -> None:
    stated = recipe(Case("deepspeed", 2, 2, parallel=SPLIT), 2)
    plan = plan_recipe(stated)
    assert (plan.layout.tp, plan.layout.dp) == (2, 1)
    rendered = BACKENDS["deepspeed"].render(stated, plan.layout)
    assert rendered["tensor_parallel"] == {"autotp_size": 2}
    assert plan_recipe(recipe(Case("deepspeed", 2, 2), 2)).layout.tp == 1
    other = recipe(Case("deepspeed", 2, 2, parallel={"tensor": 2}), 2)
    assert plan_recipe(other).model == "megatron"
