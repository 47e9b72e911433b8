"""`dmt rehearse --gpu`: memory against what arithmetic says."""

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import pytest

from tests.needs import unmet
from tests.processes import ROOT
from tests.rehearse.warm_gpu import SUBPROCESS
from toolkit.cli.main import main
from toolkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR

LLAMA = "recipes/tiny/llama-bytes.yaml"
GPUS = 4
LAYERS, HIDDEN, INNER, VOCABULARY = 4, 128, 384, 320
HEADS, KEY_HEADS, WIDTH = 4, 2, 32
"""Of that recipe."""
ON_GPUS = [
    "cluster.gpu=h100-80gb",
    f"cluster.gpus_per_node={GPUS}",
    "training.precision=bf16",
    "training.micro_batch_size=2",
    "training.global_batch_size=32",
]
NVME = [
    "parallel.engine=deepspeed",
    "parallel.zero.stage=3",
    "parallel.zero.offload_optimizer=nvme",
    "parallel.zero.nvme_path=/tmp",
]
MIB = 2**20


@pytest.fixture(autouse=True)
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked; paths are relative to the repository."""
    monkeypatch.setattr("toolkit.rehearse.gpu.dress.subprocess", SUBPROCESS)
    monkeypatch.chdir(ROOT)


def dmt(*arguments: str, overrides: list[str] = ON_GPUS) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    settings = [word for one in overrides for word in ("--set", one)]
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main([*arguments, *settings])
    return code, out.getvalue(), err.getvalue()


def rehearsed(*arguments: str, overrides: list[str] = ON_GPUS) -> dict[str, Any]:
    code, out, err = dmt("rehearse", *arguments, "--gpu", "--json", overrides=overrides)
    assert code == EXIT_DONE, err[-3000:]
    return json.loads(out)  # type: ignore[no-any-return]


def in_parallel(*parallel: str) -> list[str]:
    return [*ON_GPUS, *(f"parallel.{one}" for one in parallel)]


def parameters() -> dict[str, int]:
    """Elements of every tensor of the model, tied embeddings once."""
    projections = {"q": HEADS, "k": KEY_HEADS, "v": KEY_HEADS, "o": HEADS}
    layer = {name: HIDDEN * heads * WIDTH for name, heads in projections.items()}
    layer |= dict.fromkeys(("gate", "up", "down"), HIDDEN * INNER)
    layer |= {"norm": HIDDEN, "norm of mlp": HIDDEN}
    layers = {f"{name} {i}": size for i in range(LAYERS) for name, size in layer.items()}
    return layers | {"embedding": VOCABULARY * HIDDEN, "norm": HIDDEN}


def blocks(sizes: list[float]) -> float:
    """MiB in blocks of 512 bytes."""
    return sum(-(-int(size) // 512) * 512 for size in sizes) / MIB


@pytest.mark.slow
def test_a_rank_of_fsdp() -> None:
    """States are 4, 4 and 8 bytes of each shard."""
    found = rehearsed(
        LLAMA, overrides=in_parallel("engine=fsdp", "zero.stage=3", "replicate=1")
    )
    (rank,) = found["ranks"]
    shards = [4 * size / GPUS for size in parameters().values()]
    held = {kind: 1024 * sum(places.values()) for kind, places in rank["held_gib"].items()}
    assert held["weights"] == pytest.approx(blocks(shards))
    assert held["gradients"] == pytest.approx(blocks([sum(shards)]), rel=0.01)  # of units
    assert held["optimizer states"] == pytest.approx(2 * blocks(shards), rel=0.02)  # and steps
    assert rank["peak_gib"] == pytest.approx(sum(held.values()) / 1024)
    # What is gathered at the peak differs by 5% with what ran in this process before.
    assert rank["planned_gib"] == pytest.approx(rank["peak_gib"], rel=0.11)
    outside = 0.7 + 0.4  # GiB of CUDA, and of one communicator
    assert rank["planned_parts_gib"]["CUDA and NCCL"] == pytest.approx(outside)
    needed = rank["peak_gib"] + outside - rank["compiling_saves_gib"]
    assert rank["needed_gib"] == pytest.approx(needed)
    assert found["micro_batches"] == {"run": 2, "of": 4}


@pytest.mark.slow
def test_a_rank_of_deepspeed() -> None:
    """Most of it are buffers whose size DeepSpeed fixes."""
    found = rehearsed(LLAMA, overrides=in_parallel("engine=deepspeed", "zero.stage=3"))
    (rank,) = found["ranks"]
    assert rank["planned_gib"] == pytest.approx(rank["peak_gib"], rel=0.03)
    assert rank["fits"]


@pytest.mark.slow
def test_each_pipeline_stage_once() -> None:
    layout = in_parallel("engine=megatron", "pipeline=2", "tensor=2", "zero.stage=1")
    found = rehearsed(LLAMA, overrides=layout)
    assert [(one["rank"], one["stage"]) for one in found["ranks"]] == [(0, 0), (2, 1)]
    first, _ = found["ranks"]
    half = LAYERS // 2 * sum(size for name, size in parameters().items() if " 0" in name)
    ends = VOCABULARY * HIDDEN
    of_norms = LAYERS // 2 * 2 * HIDDEN
    weights = 1024 * sum(first["held_gib"]["weights"].values())
    assert weights * MIB == pytest.approx(
        2 * ((half - of_norms + ends) / 2 + of_norms), rel=1e-3
    )
    assert first["fits"]


@pytest.mark.slow
def test_pairs_on_another_cluster_than_the_recipes() -> None:
    """What an objective reads besides tokens is there."""
    chosen = ["training.precision=bf16", "parallel.engine=fsdp", "parallel.zero.stage=3"]
    found = rehearsed(
        "recipes/tiny/llama-dpo.yaml",
        "--cluster",
        "2x4xa100-80gb",
        overrides=[*chosen, *ON_GPUS[3:]],
    )
    assert found["layout"]["dp"] * found["layout"]["tp"] == 8
    (rank,) = found["ranks"]
    assert rank["fits"]


@pytest.mark.slow
def test_a_plan_that_is_too_large_is_found() -> None:
    large = ["parallel.engine=fsdp", "training.micro_batch_size=8", "parallel.recompute=none"]
    large += ["training.global_batch_size=64", "training.sequence_length=8192"]
    large += ["kernels.loss=whole", "kernels.compile=none", "parallel.zero.stage=3"]
    recipe = "recipes/llama/llama-3.2-1b-pretrain.yaml"
    where = "--cluster", "1x8xh100-80gb"
    code, out, err = dmt("rehearse", recipe, "--gpu", *where, overrides=large)
    assert code == EXIT_FAILED, err[-2000:]
    for text in ("model.layers.*.mlp", "does not fit", "rank 0 at its fullest"):
        assert text in out


@pytest.mark.parametrize(
    ("arguments", "overrides", "said"),
    [
        (["--cluster", "1x4xh100-80gb", "--out", "x"], ON_GPUS, "with --on gpu"),
        (["--gpu", "--on", "gpu"], ON_GPUS, "needs no GPUs"),
        (["--gpu", "--cluster", "h100-80gb"], [], "NODESxGPUSxNAME"),
        (["--gpu", "--layouts", "fsdp2"], ON_GPUS, "the recipe's own layout is run"),
        (["--gpu"], [], "a GPU, with --gpu"),
        (["--gpu"], [*ON_GPUS, "optimizer.name=muon"], "--set optimizer.name=adamw"),
        (["--gpu"], [*ON_GPUS, *NVME], "--set parallel.zero.offload_optimizer=cpu"),
    ],
)
def test_what_cannot_be_rehearsed(
    arguments: list[str], overrides: list[str], said: str
) -> None:
    code, _, err = dmt("rehearse", LLAMA, *arguments, overrides=overrides)
    assert code == EXIT_USER_ERROR
    assert said in err
    assert "Traceback" not in err


@pytest.mark.cuda_build
@pytest.mark.parametrize(
    "parallel",
    [
        ["engine=megatron", "tensor=2"],
        ["engine=fsdp", "zero.stage=3"],
        ["engine=deepspeed", "zero.stage=2"],
    ],
    ids=lambda parallel: parallel[0],
)
def test_a_cuda_build_of_torch_rehearses_without_a_gpu(parallel: list[str]) -> None:
    """It brings hooks and a device guard of its own, which look for a GPU."""
    import torch

    if torch.version.cuda is None or torch.cuda.is_available():
        unmet("a torch that is built with CUDA, on a machine without GPU")
    (rank,) = rehearsed(LLAMA, overrides=in_parallel(*parallel))["ranks"]
    assert rank["peak_gib"] > 0
