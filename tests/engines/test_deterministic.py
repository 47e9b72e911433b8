"""`training.deterministic`: what launchers set, what the worker demands, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from tests.plan.making import recipe
from toolkit.backend import BACKENDS
from toolkit.engines.deterministic import VARIABLES, as_users_mistake, switch_on, variables
from toolkit.errors import BackendUnavailable, PlanError, RecipeError
from toolkit.foreign import preflight
from toolkit.launchers.job import gpu_variables, job_of
from toolkit.plan.planner import plan_recipe
from toolkit.run.assignment import decide

GPU = {"cluster__gpu": "h100-80gb", "training__precision": "bf16"}
ASKED = {**GPU, "training__deterministic": True}
EXACT = "expandable_segments:True,pinned_max_round_threshold_mb:1"
KNOWN = Version(torch.__version__) >= Version("2.13")
ALLOCATOR = {"PYTORCH_ALLOC_CONF": EXACT if KNOWN else "expandable_segments:True"}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def test_launchers_set_what_libraries_read_once(tmp_path: Path) -> None:
    assert gpu_variables(recipe(cluster__gpu="cpu", training__deterministic=True)) == {}
    assert gpu_variables(recipe(**GPU)) == ALLOCATOR
    wanted = {name: values[0] for name, values in VARIABLES.items()}
    assert gpu_variables(recipe(**ASKED)) == {**ALLOCATOR, **wanted}
    job = job_of(decide(recipe(**ASKED), tmp_path / "run"))
    assert {**ALLOCATOR, **wanted}.items() <= job.env.items()


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_own_values_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    found = gpu_variables(recipe(**ASKED))
    assert found.keys() == VARIABLES.keys() - {"CUBLAS_WORKSPACE_CONFIG"}


def test_values_of_ones_own_that_cannot_be_are_reported_before_the_start() -> None:
    environ = {"NCCL_ALGO": "Tree", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    with pytest.raises(PlanError, match="NCCL_ALGO=Tree") as caught:
        preflight(recipe(**ASKED), "launch", environ)
    assert "Ring" in caught.value.fix and "CUBLAS" not in str(caught.value)
    preflight(recipe(**GPU), "launch", environ)


def test_the_worker_demands_them_on_gpus() -> None:
    with pytest.raises(BackendUnavailable, match="NCCL_ALGO") as caught:
        switch_on({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, on_gpu=True)
    assert "export NCCL_ALGO=Ring NVTE_ALLOW_NONDETERMINISTIC_ALGO=0" in caught.value.fix


def test_torch_is_told() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    cudnn, memory = torch.backends.cudnn, torch.utils.deterministic
    before = cudnn.benchmark, cudnn.deterministic, memory.fill_uninitialized_memory
    try:
        switch_on(variables({}), on_gpu=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert (cudnn.benchmark, cudnn.deterministic) == (False, True)
        with pytest.raises(RuntimeError) as caught:
            torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)
        cudnn.benchmark, cudnn.deterministic, memory.fill_uninitialized_memory = before
    mistake = as_users_mistake(caught.value)
    assert mistake is not None and not mistake.retry
    assert str(mistake).startswith("training.deterministic: put_ has no deterministic")
    assert as_users_mistake(RuntimeError("out of luck")) is None
    assert as_users_mistake(ValueError(str(caught.value))) is None


def planned(**changes: Any) -> Any:
    return plan_recipe(recipe(**changes))


def test_the_plan_takes_no_attention_that_is_not() -> None:
    assert planned(**GPU).attention_kernel == "cudnn"
    plan = planned(**ASKED)
    assert plan.attention_kernel == "sdpa"
    assert any(reason.startswith("deterministic: ") for reason in plan.reasons)
    with pytest.raises(RecipeError, match="it is not deterministic"):
        planned(**ASKED, kernels__attention="cudnn")
    assert planned(**ASKED, kernels__attention="flash").attention_kernel == "flash"


def test_megatron_is_told() -> None:
    wanted = recipe(**ASKED, parallel__engine="megatron")
    plan = plan_recipe(wanted)
    assert BACKENDS[plan.engine].render(wanted, plan.layout)["transformer"][
        "deterministic_mode"
    ]
