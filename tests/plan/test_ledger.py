"""The ledger follows from recipe, plan and table: change one of them, and a line changes."""

from pathlib import Path
from typing import Any

import pytest

from tests.plan.making import MIXTRAL, TINY, recipe
from toolkit.backend import adopt_engine_config
from toolkit.engines.deepspeed.config import PRESETS
from toolkit.models.families import model_spec
from toolkit.plan.ledger import LedgerEntry, ledger, summary
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import Recipe
from toolkit.run.announce import ledger_of

ALWAYS = {
    "initial weights", "data order", "packed documents", "token-mean loss", "optimizer states",
    "attention",
}  # fmt: skip


def entries(**changes: Any) -> list[LedgerEntry]:
    wanted: Recipe = recipe(**{"training__precision": "fp32"} | changes)
    assert wanted.model.config is not None
    spec = model_spec(wanted.model.config)
    return ledger(wanted, plan_recipe(wanted), spec)


def names(kind: str, **changes: Any) -> set[str]:
    return {entry.what for entry in entries(**changes) if entry.kind == kind}


def why(what: str, **changes: Any) -> str:
    (entry,) = (entry for entry in entries(**changes) if entry.what == what)
    return entry.why


TP2 = {"cluster__gpus_per_node": 2, "parallel__tensor": 2}


def test_the_plain_run_has_nothing_to_approximate() -> None:
    plain = {"parallel__engine": "ddp", "training__micro_batch_size": 8}
    assert names("approximated", **plain) == set()
    assert names("exact", **plain) == ALWAYS
    assert "parts" not in why("token-mean loss", **plain)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"training__micro_batch_size": 4}, {"order of sums"}),
        ({"cluster__gpus_per_node": 2}, {"order of sums"}),
        (TP2, {"order of sums", "kernels"}),
        ({"parallel__engine": "megatron"}, {"kernels"}),
        ({"cluster__gpus_per_node": 2, "parallel__context": 2}, {"order of sums"}),
        ({"training__precision": "bf16"}, {"bf16"}),
        (
            {"training__precision": "bf16", "cluster__gpus_per_node": 2},
            {"bf16", "order of sums", "gradient reduction"},
        ),
        ({"parallel__zero": {"offload_optimizer": "cpu"}}, {"offloaded AdamW"}),
        ({"model__config": TINY | {"attention_dropout": 0.1}}, set()),
        (
            {"model__config": TINY | {"attention_dropout": 0.1}, "cluster__gpus_per_node": 2},
            {"order of sums", "attention_dropout"},
        ),
        (
            {"model__config": MIXTRAL, "cluster__gpus_per_node": 2},
            {"order of sums", "routing"},
        ),
        (
            {
                "model__config": MIXTRAL | {"router_jitter_noise": 0.1},
                "cluster__gpus_per_node": 2,
            },
            {"order of sums", "routing", "router_jitter_noise"},
        ),
    ],
)
def test_what_is_approximated(changes: dict[str, Any], what: set[str]) -> None:
    assert names("approximated", **changes) == what


def test_numbers_are_the_plans() -> None:
    split = {
        "cluster__gpus_per_node": 4,
        "parallel__tensor": 2,
        "training__micro_batch_size": 2,
    }
    assert why("order of sums", **split) == (
        "gradients over 2 micro batches and 2 data-parallel ranks, activations over 2 "
        "tensor-parallel ranks: the same terms, other last digits"
    )
    assert "not of its 4 parts" in why("token-mean loss", **split)


def test_context_parallel_is_exact() -> None:
    spread = {"cluster__gpus_per_node": 2, "parallel__context": 2}
    assert "a row on 2 ranks" in why("context parallel", **spread)
    assert "2 context-parallel ranks" in why("order of sums", **spread)


def test_a_loss_of_pairs_is_their_mean() -> None:
    assert "pairs of the whole batch" in why("pair-mean loss", training__objective="dpo")


SIXTEEN_BITS = {"training__precision": "bf16", "cluster__gpus_per_node": 4}
FILE = {"parallel__zero": {"config": "own.json"}}


def told(**changes: Any) -> set[str]:
    """Reasons of the entries on gradients, with what DeepSpeed is really told."""
    wanted = recipe(**changes)
    entries = ledger_of(wanted, plan_recipe(wanted))
    return {entry.why for entry in entries if entry.what == "gradient reduction"}


@pytest.mark.parametrize("preset", [None, *sorted(set(PRESETS) - {"zeropp", "zero3_nvme"})])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_deepspeed_adds_gradients_in_fp32(precision: str, preset: str | None) -> None:
    """Except in stage 0, which keeps them in 16 bits anyway."""
    changes = {
        "training__precision": precision,
        "cluster__gpus_per_node": 4,
        "parallel__zero": {"config": preset},
    }
    wanted = adopt_engine_config(recipe(**changes))
    why = f"gradients are summed over 4 data-parallel ranks in {precision}"
    zero = wanted.parallel.zero.model_dump()
    assert told(**changes | {"parallel__zero": zero}) == ({why} if preset == "zero0" else set())


def test_who_adds_gradients_in_fp32() -> None:
    assert told(**SIXTEEN_BITS | {"training__precision": "fp32"}) == set()
    assert told(**SIXTEEN_BITS | {"cluster__gpus_per_node": 1}) == set()
    for engine in ("ddp", "megatron", "deepspeed"):
        assert told(**SIXTEEN_BITS, parallel__engine=engine) == set()
    # No data-parallel ranks are left.
    assert told(**SIXTEEN_BITS, parallel__engine="deepspeed", parallel__tensor=4) == set()


def test_the_recipes_own_file_says_how_gradients_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own.json"
    own.write_text('{"communication_data_type": "fp32"}')
    assert told(**SIXTEEN_BITS, **FILE) == set()
    own.write_text('{"communication_data_type": "bf16"}')
    (why,) = told(**SIXTEEN_BITS | {"training__precision": "fp32"}, **FILE)
    assert why.endswith("4 data-parallel ranks in bf16")


def test_padded_vocabulary_is_exact() -> None:
    odd = {"model__config": TINY | {"vocab_size": 509}}
    assert "padded vocabulary" not in names("exact", **odd)
    assert why("padded vocabulary", **odd, **TP2).startswith(
        "509 rows padded to 510 for tensor"
    )
    assert "padded vocabulary" not in names("exact", **TP2)


def test_only_what_the_recipe_does_is_listed() -> None:
    assert names("exact") == ALWAYS
    assert "recompute" in names("exact", parallel__recompute="full")


def test_the_balance_of_experts_is_exact() -> None:
    balance = {"kind": "sequence_loss", "coefficient": 0.01}
    wanted = {"model__config": MIXTRAL, "model__balance": balance}
    assert "balance of experts" in names("exact", **wanted)


def test_summary_has_a_line_per_kind() -> None:
    exact, approximated = summary(entries(**TP2))
    assert exact.startswith("exact: initial weights, data order, packed documents")
    assert approximated == "approximated: order of sums, kernels"


def test_fp16_states_its_loss_scale_and_every_plan_its_attention() -> None:
    sixteen = {"training__precision": "fp16", "cluster__gpu": "h100-80gb"}
    assert "65,536 times the mean loss" in why("loss scale", **sixteen)
    assert "loss scale" not in names("approximated", training__precision="bf16")
    for engine in ("ddp", "megatron", "deepspeed"):
        assert why("attention", parallel__engine=engine).startswith("sdpa")


def test_the_ledger_says_whether_documents_are_isolated() -> None:
    assert "attention crosses" in why("packed documents")
    isolated = {"data__isolate_documents": True}
    assert "its own only" in why("isolated documents", **isolated)
    assert "packed documents" not in names("exact", **isolated)
