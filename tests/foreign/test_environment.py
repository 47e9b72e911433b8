"""Variables that would hang a run or change what it computes are refused before it starts."""

from pathlib import Path

import pytest

from tests.foreign.conftest import TINY
from toolkit.errors import PlanError
from toolkit.foreign import preflight
from toolkit.foreign.environment import Starting
from toolkit.intake.load import load_recipe
from toolkit.run.assignment import assign

ON_GPUS = ("cluster.gpu=h100-80gb", "training.precision=fp32")
DETERMINISTIC = (*ON_GPUS, "training.deterministic=true")


@pytest.mark.parametrize(
    ("starting", "overrides", "environ"),
    [
        ("launch", ON_GPUS, {"CUDA_VISIBLE_DEVICES": "0"}),
        ("launch", ON_GPUS, {"CUDA_VISIBLE_DEVICES": ""}),
        ("launch", ON_GPUS, {"DS_ACCELERATOR": "cpu"}),
        ("worker", ON_GPUS, {"DS_ACCELERATOR": "cpu"}),
        ("worker", (), {"DS_ACCELERATOR": "cuda"}),
        ("worker", ON_GPUS, {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}),
        ("launch", DETERMINISTIC, {"NCCL_ALGO": "Tree"}),
    ],
    ids=str,
)
def test_what_would_break_is_refused(
    starting: Starting, overrides: tuple[str, ...], environ: dict[str, str]
) -> None:
    recipe = load_recipe(TINY, overrides)
    preflight(recipe, starting, {})
    with pytest.raises(PlanError) as caught:
        preflight(recipe, starting, environ)
    assert next(iter(environ)) in caught.value.message and caught.value.fix


@pytest.mark.parametrize(
    ("starting", "overrides", "environ"),
    [
        ("launch", (), {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": ""}),  # for CPUs
        ("worker", ON_GPUS, {"CUDA_VISIBLE_DEVICES": "0", "WORLD_SIZE": "2"}),
        ("launch", ON_GPUS, {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_ALGO": "Tree"}),
        ("launch", (), {"PET_NNODES": "2", "ACCELERATE_USE_FSDP": "true"}),
    ],
    ids=str,
)
def test_what_changes_nothing_is_not(
    starting: Starting, overrides: tuple[str, ...], environ: dict[str, str]
) -> None:
    preflight(load_recipe(TINY, overrides), starting, environ)


def test_launch_and_a_worker_refuse_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    with pytest.raises(PlanError, match="DS_ACCELERATOR=cuda"):
        assign(TINY, (), tmp_path / "run", ["train.py"], world=2)
    monkeypatch.delenv("DS_ACCELERATOR")
    with pytest.raises(PlanError, match="4"):
        assign(TINY, (), tmp_path / "run", ["train.py"], world=4)
    assert not (tmp_path / "run").exists()
