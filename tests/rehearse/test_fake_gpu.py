"""The engines' own steps on GPUs that are not there: what would wait, mix devices or widen.

One process starts all ranks, one after the other (`fake_gpu_ranks.py`): no test may be in it,
since its torch believes that it has CUDA.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cases import MIXTRAL

pytestmark = pytest.mark.slow

WAITS = "the host waits for the GPU"
MIXED = "tensors of two devices meet"
WIDENED = "16-bit activations become fp32"
NOT_NCCL = "NCCL gets a tensor in host memory"
PARAMETERS = 80512
"""Of the model of `parity_worker`."""


def case(engine: str, micro_batch: int = 2, precision: str = "bf16", **more: Any) -> Any:
    return {"engine": engine, "micro_batch": micro_batch, "precision": precision, **more}


def megatron(micro_batch: int = 1, **parallel: Any) -> Any:
    return case("megatron", micro_batch, family={"num_hidden_layers": 4}, parallel=parallel)


TP2 = case("megatron", parallel={"tensor": 2, "sequence": True})
FSDP = case("fsdp", stage=3)
IN_TURN = {"kernels": {"experts": "sequential"}}
ZERO2 = {"stage": 2, "parallel": {"model": "hf"}}
BUGS = ("host", "scaled", "looked_at", "printed", "synchronized")
RANKS = {
    "ddp": (case("ddp"), 2, 1, ""),
    "ddp-fp32": (case("ddp", precision="fp32"), 1, 0, ""),
    "fsdp1": (case("fsdp", stage=1), 2, 0, ""),
    "fsdp2": (case("fsdp", stage=2), 2, 0, ""),
    "fsdp3": (FSDP, 2, 1, ""),
    "fsdp3-replicate": (case("fsdp", 1, stage=3, parallel={"replicate": 2}), 4, 3, ""),
    "fsdp3-fp32": (case("fsdp", precision="fp32", stage=3), 2, 0, ""),
    "fsdp3-offload": (case("fsdp", precision="fp16", stage=3, offload="cpu"), 2, 1, ""),
    "tp2": (TP2, 4, 0, ""),
    "tp2-fp32": (case("megatron", precision="fp32", parallel={"tensor": 2}), 2, 0, ""),
    "megatron-zero1": (case("megatron", stage=1), 2, 1, ""),
    "pp2-first": (megatron(pipeline=2, virtual_pipeline=1), 2, 0, ""),
    "pp2-last": (megatron(pipeline=2, virtual_pipeline=1), 2, 1, ""),
    "vpp": (megatron(pipeline=2, virtual_pipeline=2), 2, 1, ""),
    "ep1": (case("megatron", 1, family=MIXTRAL), 2, 0, ""),
    "ep2": (case("megatron", 1, family=MIXTRAL, parallel={"expert": 2}), 2, 0, ""),
    **{
        f"in turn, ep{degree}": (
            case("megatron", 1, family=MIXTRAL, parallel={"expert": degree}, **IN_TURN),
            2,
            0,
            "",
        )
        for degree in (1, 2)
    },
    **{
        f"zero{stage}": (case("deepspeed", stage=stage, parallel={"model": "hf"}), 2, 0, "")
        for stage in range(4)
    },
    "zero2-offload": (case("deepspeed", offload="cpu", **ZERO2), 2, 0, ""),
    **{f"fsdp-{bug}": (FSDP, 2, 0, bug) for bug in BUGS},
    **{f"tp2-{bug}": (TP2, 4, 0, bug) for bug in BUGS},
}
"""Case, ranks of the layout, the rank that is looked at, and the bug that it has."""
SOUND = [name for name, (_, _, _, bug) in RANKS.items() if not bug]
SELDOM = ("ddp-fp32", "fsdp2", "fsdp3-fp32", "tp2-fp32", "pp2-last", "in turn, ep1")
"""Sound ranks that are left to `make soak`, as are bugs under tp2."""


def of(names: list[str]) -> list[Any]:
    """These ranks as parameters of a test, marked."""
    soak = pytest.mark.soak
    return [pytest.param(name, marks=soak if name in SELDOM else ()) for name in names]


MCORE = {"clip_grads.py get_grad_norm_fp32"}
COUNTS = {"token_dispatcher.py _maybe_dtoh_and_synchronize"}
WAITED = {
    "ddp": set(),
    "fsdp": set(),
    "tp2": MCORE,
    "megatron": MCORE,
    "pp2": MCORE,
    "vpp": MCORE,
    # Grouped experts, of which this rank has all, or half: the dispatcher sends as many tokens
    # as were routed to them.
    "ep1": MCORE,
    "ep2": MCORE | COUNTS,
    "in turn": MCORE | COUNTS | {"moe_utils.py permute"},
    "zero0": {
        "utils.py has_overflow",
        "utils.py has_overflow_serial",
        "utils.py get_weight_norm",
    },
    "zero1": {
        "utils.py mask_nan_or_inf_with_val_inplace",
        "utils.py is_invalid_grad_norm",
        "utils.py clip_tensors_by_global_norm",
    },
    # From stage 2 on, the backward pass ends with a wait for the reductions of gradients.
    "zero2": {
        "stage_1_and_2.py independent_gradient_partition_epilogue",
        "stage_1_and_2.py has_overflow",
        "utils.py mask_nan_or_inf_with_val_inplace",
        "utils.py is_invalid_grad_norm",
    },
    "zero3": {
        "stage3.py independent_gradient_partition_epilogue",
        "stage3.py get_grad_norm_direct",
        "utils.py is_invalid_grad_norm",
        "partition_parameters.py _allgather_params_coalesced",
    },
}
"""Where libraries let the host wait in a step; the engines themselves do it in one place."""
OURS = {"engine.py _read", "engine.py _run", "data_parallel.py train_step"}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """By name of the rank, what was found; only of those that the tests to run look at."""
    here = [item for item in request.session.items if item.path == request.path]
    names = list(RANKS)
    if not any(item.get_closest_marker("soak") for item in here):
        names = [name for name in RANKS if name not in SELDOM and not name.startswith("tp2-")]
    ranks = [(name, *RANKS[name]) for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearse.fake_gpu_ranks"],
        input=json.dumps(ranks),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def _kind(name: str) -> str:
    """The key of a rank in `WAITED`."""
    return next(kind for kind in WAITED if name.startswith(kind))


def places(rank: Any, what: str, *phases: str) -> set[str]:
    """`file function` of the innermost frames of one kind of finding."""
    return set(every_place(rank, what, *phases))


def every_place(rank: Any, what: str, *phases: str) -> list[str]:
    """The same, once for each finding."""
    assert "error" not in rank, rank["error"]
    return [
        f"{finding['where'][0].partition(':')[0]} {finding['where'][0].split(' ')[1]}"
        for finding in rank["findings"]
        if finding["what"] == what and finding["phase"] in (phases or (finding["phase"],))
    ]


@pytest.mark.parametrize("name", of(SOUND))
def test_devices_are_not_mixed(found: dict[str, Any], name: str) -> None:
    """Nor does NCCL get what lies in host memory: it has its own group."""
    assert places(found[name], MIXED) == set()
    assert places(found[name], NOT_NCCL) == set()
    state = found[name]["state"]
    assert state["weight"] == state["exp_avg"] == state["exp_avg_sq"] > 0


@pytest.mark.parametrize("name", of([name for name in SOUND if "offload" not in name]))
def test_a_step_waits_for_the_gpu_once(found: dict[str, Any], name: str) -> None:
    """Also the step of a resumed run; what the libraries do besides is known."""
    for phase in ("step", "resume"):
        waits = every_place(found[name], WAITS, phase)
        mine = [place for place in waits if place in OURS]
        assert len(mine) == 1, "also within that function"
        assert {*waits} - {*mine} - {"rank.py _resume"} == WAITED[_kind(name)]
    assert len(places(found[name], WAITS, "evaluate") & {"totals.py evaluate", *OURS}) == 1


@pytest.mark.parametrize("name", of(SOUND))
def test_a_save_waits_for_nothing_and_copies_on_the_stream_of_updates(
    found: dict[str, Any], name: str
) -> None:
    """In order with them: an update cannot change what is still being copied."""
    assert places(found[name], WAITS, "save") == set()
    events, streams = zip(*found[name]["streams"], strict=True)
    assert {"copy", "update"} <= {*events} and len({*streams}) == 1


@pytest.mark.parametrize("name", of(SOUND))
def test_activations_stay_in_16_bits(found: dict[str, Any], name: str) -> None:
    assert places(found[name], WIDENED, "step", "evaluate") == set()


@pytest.mark.parametrize("name", of([one for one in SOUND if not one.startswith("zero")]))
def test_adamw_is_one_kernel(found: dict[str, Any], name: str) -> None:
    """Whose step counters, of a resumed run too, are where it looks for them."""
    where = "cpu" if name == "fsdp3-offload" else "cuda:0"
    assert found[name]["fused"] == [True]
    assert found[name]["counters"] == [where]


@pytest.mark.parametrize(
    "model",
    ["fsdp", pytest.param("tp2", marks=pytest.mark.soak)],
)
def test_planted_bugs_are_found_where_they_are(found: dict[str, Any], model: str) -> None:
    batch_on_host = found[f"{model}-host"]
    (place,) = places(batch_on_host, MIXED)
    assert place in ("log_probs.py label_log_probs", "layers.py forward")
    assert "two devices" in batch_on_host["ended_by"]
    here = "fake_gpu_ranks.py"
    assert f"{here} scaled" in places(found[f"{model}-scaled"], WIDENED, "step")
    assert f"{here} looked_at" in places(found[f"{model}-looked_at"], WAITS, "step")
    assert f"{here} printed" in places(found[f"{model}-printed"], WAITS, "step")
    assert f"{here} synchronized" in places(found[f"{model}-synchronized"], WAITS, "step")


def test_deepspeed_reduces_gradients_in_fp32(found: dict[str, Any]) -> None:
    """From stage 1 on, and 16-bit gradients before."""
    sizes = {
        stage: {one["nbytes"] for one in found[f"zero{stage}"]["collectives"]}
        for stage in (0, 1, 2)
    }
    assert 4 * PARAMETERS not in sizes[0]
    assert 2 * PARAMETERS in sizes[0]
    assert 4 * PARAMETERS in sizes[1] & sizes[2]


def test_each_rank_of_two_holds_half(found: dict[str, Any]) -> None:
    for name in ("zero2", "zero3", "megatron-zero1"):
        assert found[name]["state"]["weight"] == PARAMETERS // 2
    assert found["ddp"]["state"]["weight"] == found["zero0"]["state"]["weight"] == PARAMETERS
