"""A checkpoint of any layout continues in any other: the same state to the bit, the same run.

Regressions (resuming on other GPUs or in another layout): DeepSpeed#5405, #2921,
#7200; Megatron-LM#659, #1517, #7162; ms-swift#8240. Five layers divide by no pipeline,
101 tokens by no tensor group.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.engines.cases import (
    BIAS,
    GLM,
    LAYERS,
    MIXTRAL,
    OFFLOAD_TOLERANCE,
    TOLERANCE,
    Case,
    assert_curves,
    curves,
    global_batches,
    loss_of,
    megatron,
    new_engine,
    plain_model,
    steps,
    write_state,
)
from tests.engines.pairs import GROUPS
from tests.forked import call_ranks, end_groups
from tests.models.configs import config_of
from toolkit.checkpoint.export import export
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import whole_quantity
from toolkit.checkpoint.store import folder_name
from toolkit.checkpoint.verify import verify
from toolkit.engines.distributed import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
"""What PEFT reads."""
GPT_OSS = config_of("gpt_oss", num_hidden_layers=2)
ADAPTER = {"rank": 3, "alpha": 5, "targets": "all-linear"}


def zero(stage: int, family: dict[str, Any] = LAYERS, **more: Any) -> Case:
    """Engine deepspeed, two ranks."""
    return Case("deepspeed", 2, stage=stage, family=family, **more)


LAYOUTS: dict[str, tuple[int, Case]] = {
    "ddp-1": (1, Case("ddp", 2, family=LAYERS)),
    "ddp-2": (2, Case("ddp", 2, family=LAYERS)),
    "zero0-2": (2, zero(0)),
    "zero1-2": (2, zero(1)),
    "zero2-2": (2, zero(2)),
    "zero3-2": (2, zero(3)),
    "zero3-2-offload": (2, zero(3, offload="cpu")),
    "fsdp2-2": (2, Case("fsdp", 2, stage=2, family=LAYERS)),
    "fsdp3-2": (2, Case("fsdp", 2, stage=3, family=LAYERS)),
    "tp2": (2, megatron(tensor=2)),
    "pp2": (2, megatron(pipeline=2)),
    "pp2-vpp2": (2, megatron(pipeline=2, virtual_pipeline=2, stages=(2, 1, 1, 1))),
    "dp2-distributed": (2, megatron(stage=1)),
    "tp2-zero1": (
        2,
        zero(1, parallel={"model": "megatron", "tensor": 2}),
    ),
    "tp2-pp2": (4, megatron(tensor=2, pipeline=2)),
    "tp2-cp2": (4, megatron(tensor=2, context=2)),
}
"""Name → ranks and case."""
SOME = {name: LAYOUTS[name] for name in ("ddp-2", "fsdp3-2", "pp2-vpp2", "tp2-cp2")}
"""Ways to cut a state that `test_between_engines` does not have, and FSDP2."""
MOE: dict[str, tuple[int, Case]] = {
    "ddp-2": (2, Case("ddp", 2, family=MIXTRAL)),
    "zero3-2": (2, Case("deepspeed", 2, stage=3, family=MIXTRAL)),
    "ep2": (2, megatron(expert=2, family=MIXTRAL)),
    "ep2-replicated": (2, megatron(expert=2, stage=0, family=MIXTRAL)),
    "tp2-ep2": (4, megatron(tensor=2, expert=2, family=MIXTRAL)),
}


MAMBA = {
    "model_type": "mamba", "vocab_size": 101, "hidden_size": 32, "state_size": 4,
    "num_hidden_layers": 2,
}  # fmt: skip
OPTIMIZERS = {"muon": 7e-5, "adamw_8bit": 1e-4}
"""At larger rates AdamW, and the bf16 of Muon's iteration, make a difference of 1e-5 of what is
rounded otherwise."""
TWO_LAYERS = {"num_hidden_layers": 2}
OWNERS = [
    megatron(tensor=2, family=TWO_LAYERS),
    zero(2, family=TWO_LAYERS),
    megatron(pipeline=2, family=TWO_LAYERS),
    Case("fsdp", 2, 3),
]


def each(cases: list[Case], **changes: Any) -> list[Case]:
    return [replace(case, **changes) for case in cases]


FEATURES: dict[str, list[Case]] = {
    # Transposed, gate and up projection in alternating columns, cut anywhere by ZeRO-3 and by
    # megatron-core's distributed optimizer.
    "stacked experts": [zero(3, family=GPT_OSS), megatron(tensor=2, family=GPT_OSS)],
    # Its weights have three axes.
    "convolution": each([Case("ddp", 2), Case("fsdp", 2, stage=3)], family=MAMBA),
    # All of the first of two pipeline stages.
    "frozen": each(
        [zero(3), megatron(pipeline=2), Case("fsdp", 2, stage=3, family=LAYERS)],
        freeze=("model.embed_tokens.*", "model.layers.[0-2].*"),
    ),
    "groups": each(
        [zero(3), megatron(pipeline=2)], groups=GROUPS, optimizer={"learning_rate": 3e-4}
    ),
    "adapters": each(
        [
            zero(3),
            megatron(tensor=2, sequence=True),
            megatron(pipeline=2),
            Case("fsdp", 2, stage=3, family=LAYERS),
        ],
        adapter=ADAPTER,
    ),
    # Columns of B lie apart: ranks have two experts, a half of each, or rows of all.
    "adapters of experts": each(
        [
            Case("fsdp", 2, stage=3),
            megatron(expert=2),
            megatron(tensor=2, sequence=True),
        ],
        family=MIXTRAL,
        adapter=ADAPTER | {"targets": ["attention", "experts"], "rank": 8},
    ),
    # Without them, a run would continue with biases of 0.
    "biases": each([Case("deepspeed", 4, 3), megatron(expert=2)], family=GLM, balance=BIAS),
    **{
        name: each(OWNERS, optimizer={"name": name, "learning_rate": rate})
        for name, rate in OPTIMIZERS.items()
    },
}
"""What two ranks save on one engine and continue on another."""
TO_THE_BIT: dict[str, list[Case]] = {
    # The fp32 weights are saved; the 16-bit ones of the model follow from them.
    "bf16": each(
        [
            zero(1),
            zero(3),
            Case("ddp", 2, family=LAYERS),
            megatron(stage=1),
            megatron(tensor=2),
        ],
        precision="bf16",
    ),
    "fp8": each(
        [Case("ddp", 2), Case("fsdp", 2, stage=3)], precision="bf16", kernels={"fp8": "rowwise"}
    ),
    # Random streams follow from the step.
    "dropout": each(
        [megatron(tensor=2, sequence=False), megatron(pipeline=2)],
        family=LAYERS | {"attention_dropout": 0.3},
    ),
}
"""What differs between layouts, but continues in its own one to the bit."""
WITHOUT: dict[str, dict[str, Any]] = {"fp8": {"kernels": {}}, "dropout": {"family": LAYERS}}
"""Changes that turn such a feature off."""


SAVED_AT = 2
END = 4


def save_all(ranks: Ranks, folder: Path, cases: Mapping[str, Case]) -> dict[str, Any]:
    """Train each case a little, save, and go on: what every continuation is compared with."""
    found = {}
    for name, case in cases.items():
        engine, layout = new_engine(case, ranks)
        steps(engine, layout, ranks, 0, SAVED_AT, case.learning_rate)
        saved = write_state(case, ranks, engine, SAVED_AT, folder / name)
        assert ranks.rank or verify(saved).problems == ()
        found[name] = curves(steps(engine, layout, ranks, SAVED_AT, END, case.learning_rate))
        engine.close()
    return found


def load_all(
    ranks: Ranks, folder: Path, cases: Mapping[str, Case], pairs: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], Any]:
    """Continue the first layout of each pair in the second, if that is one of the cases."""
    return {
        (source, target): _load(ranks, folder, source, target, cases[target])
        for source, target in pairs
        if target in cases
    }


def _load(ranks: Ranks, folder: Path, source: str, target: str, case: Case) -> dict[str, Any]:
    checkpoint = folder / source / folder_name(SAVED_AT)
    engine, layout = new_engine(case, ranks, checkpoint)
    again = write_state(case, ranks, engine, SAVED_AT, folder / f"{source}-in-{target}")
    different = _differences(checkpoint, again) if ranks.rank == 0 else []
    continued = steps(engine, layout, ranks, SAVED_AT, END, case.learning_rate)
    engine.close()
    return {**curves(continued), "different": different}


def _differences(one: Path, other: Path) -> list[str]:
    """Tensors of the state that are not equal to the bit."""
    a, b = SavedState(one), SavedState(other)
    if a.shapes != b.shapes:
        return [f"tensors {sorted(set(a.shapes) ^ set(b.shapes))}"]
    return [
        f"{quantity} of {name}"
        for name, shape in a.shapes.items()
        for quantity in {*a.quantities(name), *b.quantities(name)}
        if not torch.equal(
            a.read(quantity, whole_quantity(quantity, name, shape)),
            b.read(quantity, whole_quantity(quantity, name, shape)),
        )
    ]


def write_all(folder: Path, layouts: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of every layout; how each went on unbroken."""
    unbroken = {}
    for world, cases in by_ranks(layouts):
        unbroken |= call_ranks(save_all, world, folder, cases)[0]
    return unbroken


def check(folder: Path, unbroken: Any, layouts: Any, pairs: list[tuple[str, str]]) -> None:
    """Continue the first layout of each pair in the second."""
    for world, cases in by_ranks({target: layouts[target] for _, target in pairs}):
        found = call_ranks(load_all, world, folder, cases, pairs)[0]
        for (source, target), result in found.items():
            name = f"{source} in {target}"
            assert result["different"] == [], name
            tolerance = OFFLOAD_TOLERANCE if "offload" in name else TOLERANCE
            wanted = unbroken[source]
            assert_curves(result, wanted, tolerance=tolerance, name=name)
            if source == target:
                assert all(result[quantity] == wanted[quantity] for quantity in wanted), (
                    f"{name}: not bitwise the same"
                )


def check_exports(folder: Path, unbroken: Any, layouts: Any) -> None:
    """transformers alone has the loss of the next step by each checkpoint's export; adapters by
    PEFT beside their base, and merged."""
    next_batch = global_batches(SAVED_AT + 1)[-1]
    for name, (_, case) in layouts.items():
        wanted = pytest.approx(unbroken[name]["loss"][0], rel=TOLERANCE)
        for model in exported(folder / name / folder_name(SAVED_AT), case):
            assert loss_of(model.eval(), next_batch) == wanted, name


def exported(checkpoint: Path, case: Case) -> Iterator[Any]:
    """What transformers, and PEFT, load of a checkpoint's exports."""
    adapters, whole = checkpoint / "adapters", checkpoint / "exported"
    export(checkpoint, whole, merged=case.adapter is not None)
    yield AutoModelForCausalLM.from_pretrained(whole)
    if case.adapter is not None:
        export(checkpoint, adapters)
        yield PeftModel.from_pretrained(plain_model(case), adapters)


def by_ranks(layouts: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each number of ranks with the cases of the layouts that have so many."""
    for world in sorted({world for world, _ in layouts.values()}):
        yield world, {name: case for name, (ranks, case) in layouts.items() if ranks == world}


def around(layouts: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs in which every layout is left once and entered once."""
    names = random.Random(5).sample(list(layouts), len(layouts))
    return list(zip(names, [*names[1:], names[0]], strict=True))


@pytest.fixture(scope="module", autouse=True)
def ranks_that_wait() -> Iterator[None]:
    """They leave when other tests come."""
    yield
    end_groups()


@pytest.mark.slow
@pytest.mark.quick
def test_between_engines(tmp_path: Path) -> None:
    """Each place in which an engine keeps moments."""
    some = {
        name: LAYOUTS[name]
        for name in ("fsdp3-2", "zero2-2", "zero3-2", "dp2-distributed", "tp2")
    }
    check(tmp_path, write_all(tmp_path, some), some, around(some))


@pytest.mark.slow
def test_some_pairs(tmp_path: Path) -> None:
    check_exports(tmp_path, continued(tmp_path, SOME, around(SOME), *SOME), SOME)


@pytest.mark.slow
def test_some_pairs_with_experts(tmp_path: Path) -> None:
    found = continued(tmp_path, MOE, around(MOE), "ep2")
    check_exports(tmp_path, found, MOE)


def named(feature: str, cases: list[Case]) -> dict[str, tuple[int, Case]]:
    return {f"{feature} {number}": (2, case) for number, case in enumerate(cases)}


def continued(folder: Path, layouts: Any, pairs: list[tuple[str, str]], *same: str) -> Any:
    """How each layout went on unbroken, once `pairs`, and some layouts themselves, have
    continued."""
    found = write_all(folder, layouts)
    check(folder, found, layouts, pairs + [(name, name) for name in same])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_some_pairs_of_features(tmp_path: Path, feature: str) -> None:
    layouts = named(feature, FEATURES[feature])
    found = continued(tmp_path, layouts, around(layouts), next(iter(layouts)))
    check_exports(tmp_path, found, layouts)


@pytest.mark.slow
@pytest.mark.parametrize("feature", TO_THE_BIT)
def test_in_the_same_layout(tmp_path: Path, feature: str) -> None:
    layouts = named(feature, TO_THE_BIT[feature])
    found = continued(tmp_path, layouts, [], *layouts)
    if feature not in WITHOUT:
        return
    plain = named(feature, each(TO_THE_BIT[feature], **WITHOUT[feature]))
    for name, without in write_all(tmp_path / "plain", plain).items():
        assert found[name]["loss"] != pytest.approx(without["loss"], rel=10 * TOLERANCE), name
        if feature == "fp8":
            assert found[name]["loss"] == pytest.approx(without["loss"], rel=0.02), name


@pytest.mark.soak
@pytest.mark.usefixtures("cpu_adam")
def test_every_layout(tmp_path: Path) -> None:
    continued(tmp_path, LAYOUTS, around(LAYOUTS), *LAYOUTS)
