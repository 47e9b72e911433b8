"""The ledger follows from recipe and plan: change one of them, and a line changes."""

from pathlib import Path
from typing import Any

import pytest

from tests.plan.making import MIXTRAL, TINY, recipe
from toolkit.backend import adopt_engine_config
from toolkit.engines.deepspeed.config import PRESETS
from toolkit.models.families import model_spec
from toolkit.plan.ledger import LedgerEntry, ledger
from toolkit.plan.planner import plan_recipe
from toolkit.run.announce import ledger_of

TWO = {"cluster__gpus_per_node": 2}
TP2 = TWO | {"parallel__tensor": 2}
CP2 = TWO | {"parallel__context": 2}
DROPOUT = {"model__config": TINY | {"attention_dropout": 0.1}}
SPLIT = {"cluster__gpus_per_node": 4, "parallel__tensor": 2, "training__micro_batch_size": 2}
FP16 = {"training__precision": "fp16", "cluster__gpu": "h100-80gb"}


def entries(**changes: Any) -> list[LedgerEntry]:
    wanted = recipe(**{"training__precision": "fp32"} | changes)
    assert wanted.model.config is not None
    return ledger(wanted, plan_recipe(wanted), model_spec(wanted.model.config))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"parallel__engine": "ddp", "training__micro_batch_size": 8}, set()),
        ({"training__micro_batch_size": 4}, {"order of sums"}),
        (TWO, {"order of sums"}),
        (TP2, {"order of sums", "kernels"}),
        ({"parallel__engine": "megatron"}, {"kernels"}),
        (CP2, {"order of sums"}),
        ({"training__precision": "bf16"}, {"bf16"}),
        (
            TWO | {"training__precision": "bf16"},
            {"bf16", "order of sums", "gradient reduction"},
        ),
        ({"parallel__zero": {"offload_optimizer": "cpu"}}, {"offloaded AdamW"}),
        (DROPOUT, set()),
        (DROPOUT | TWO, {"order of sums", "attention_dropout"}),
        (TWO | {"model__config": MIXTRAL}, {"order of sums", "routing"}),
        (
            TWO | {"model__config": MIXTRAL | {"router_jitter_noise": 0.1}},
            {"order of sums", "routing", "router_jitter_noise"},
        ),
    ],
)
def test_what_is_approximated(changes: dict[str, Any], what: set[str]) -> None:
    assert {entry.what for entry in entries(**changes)} == what


@pytest.mark.parametrize(
    ("changes", "what", "why"),
    [
        (
            SPLIT,
            "order of sums",
            "split over 2 micro batches, 2 data-parallel ranks, 2 tensor-parallel ranks: the "
            "same terms, other last digits",
        ),
        (CP2, "order of sums", "2 context-parallel ranks"),
        (FP16, "loss scale", "65,536 times the mean loss"),
    ],
)
def test_numbers_are_the_plans(changes: dict[str, Any], what: str, why: str) -> None:
    (entry,) = (entry for entry in entries(**changes) if entry.what == what)
    assert why in entry.why


SIXTEEN_BITS = {"training__precision": "bf16", "cluster__gpus_per_node": 4}


def told(**changes: Any) -> set[str]:
    """Reasons of the entries on gradients, with what DeepSpeed is really told."""
    wanted = recipe(**changes)
    entries = ledger_of(wanted, plan_recipe(wanted))
    return {entry.why for entry in entries if entry.what == "gradient reduction"}


@pytest.mark.parametrize(
    "preset", [None, *sorted(set(PRESETS) - {"zero0", "zeropp", "zero3_nvme"})]
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_deepspeed_adds_gradients_in_fp32(precision: str, preset: str | None) -> None:
    changes = SIXTEEN_BITS | {"training__precision": precision}
    wanted = adopt_engine_config(recipe(**changes, parallel__zero={"config": preset}))
    zero = wanted.parallel.zero.model_dump()
    assert told(**changes, parallel__zero=zero) == set()


def test_the_recipes_own_file_says_how_gradients_are_sent(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    file = {"parallel__zero": {"config": str(own)}}
    own.write_text('{"communication_data_type": "fp32"}')
    assert told(**SIXTEEN_BITS, **file) == set()
    own.write_text('{"communication_data_type": "bf16"}')
    (why,) = told(**SIXTEEN_BITS | {"training__precision": "fp32"}, **file)
    assert why.endswith("4 data-parallel ranks in bf16")
