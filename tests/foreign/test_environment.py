"""The environment and the recipe: what is compared, precedence, what may not start."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.foreign.conftest import TINY, Planned
from tests.models.small import FAMILIES, section
from toolkit.errors import PlanError
from toolkit.foreign import environment, environment_conflicts, preflight
from toolkit.foreign.compare import compare
from toolkit.foreign.environment import Starting
from toolkit.foreign.facts import facts

NOWHERE = {"HF_HOME": "/nonexistent"}
FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 2
fsdp_config:
  fsdp_version: 1
  fsdp_sharding_strategy: FULL_SHARD
"""


def conflicts(
    planned: Planned, environ: Mapping[str, str], starting: Starting | None = None
) -> dict[str, tuple[str, str, str]]:
    """By name: our key, its value, and which takes precedence."""
    found = environment_conflicts(
        planned.recipe, planned.plan, starting, {**NOWHERE, **environ}
    )
    return {row.name: (row.key, row.recipe, row.winner) for row in found}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_shape_to_compare(family: str, tiny: Planned) -> None:
    recipe = tiny.recipe.model_copy(update={"model": section(family)})
    assert facts(recipe, tiny.plan)["megatron.hidden_size"].value == 64


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, ("training.precision", "fp32")),
        ({"ACCELERATE_USE_FSDP": "true"}, ("parallel.engine", "deepspeed")),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, ("parallel.engine", "deepspeed")),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}, ("gradient_accumulation", "1")),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, ("compiled", "false")),
        ({"WANDB_MODE": "disabled"}, ("logging.wandb.mode", "offline")),
        ({"WANDB_PROJECT": "other"}, ("logging.wandb.project", "dmt")),
        ({"WANDB_DISABLED": "true"}, ("logging.wandb", "true")),
        ({"WANDB_NAME": "other"}, ("name", "tiny-llama-bytes")),
        ({"WORLD_SIZE": "4"}, ("world_size", "2")),
        ({"LOCAL_WORLD_SIZE": "1"}, ("cluster.gpus_per_node", "2")),
        ({"SLURM_NNODES": "2"}, ("cluster.nodes", "1")),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, ("launch.max_restarts", "0")),
        ({"DS_ACCELERATOR": "cuda"}, ("cluster.gpu", "cpu")),
    ],
    ids=str,
)
def test_a_variable_that_disagrees(
    environ: dict[str, str], found: tuple[str, str], tiny: Planned
) -> None:
    ((name, (*setting, winner)),) = conflicts(tiny, environ).items()
    assert (name, tuple(setting)) == (next(iter(environ)), found)
    assert winner


@pytest.mark.parametrize(
    "environ",
    [
        {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"},
        {"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "1"},
        {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},  # without ACCELERATE_USE_DEEPSPEED
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
        {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "1"},
        {"WANDB_MODE": "offline", "WANDB_PROJECT": "dmt", "WANDB_ENTITY": "me"},
        {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},  # the recipe is for CPUs
        {"SLURM_NNODES": "1", "SLURM_JOB_ID": "17"},
        {"PET_NPROC_PER_NODE": "gpu", "PET_NNODES": "1:4"},
    ],
    ids=str,
)
def test_a_variable_that_agrees_is_silent(environ: dict[str, str], tiny: Planned) -> None:
    assert conflicts(tiny, environ) == {}


def test_accelerates_variables_count_while_their_switch_is_on(tiny: Planned) -> None:
    environ = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "FSDP_VERSION": "1",
    }
    assert conflicts(tiny, environ) == {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("parallel.zero.stage", "2", "recipe"),
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (
            "parallel.zero.offload_optimizer",
            "none",
            "recipe",
        ),
        "ACCELERATE_GRADIENT_CLIPPING": ("optimizer.clip_grad_norm", "1", "recipe"),
    }


def test_deepspeeds_json_in_a_variable(tiny: Planned) -> None:
    environ = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": '{"zero_optimization": {"stage": 3}}',
    }
    assert conflicts(tiny, environ) == {
        "zero_optimization.stage": ("parallel.zero.stage", "2", "recipe")
    }


def test_precedence_depends_on_who_starts(tiny: Planned) -> None:
    environ = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    winners = {
        starting: [winner for _, _, winner in conflicts(tiny, environ, starting).values()]
        for starting in ("launch", "worker")
    }
    assert winners == {"launch": ["recipe", "recipe"], "worker": ["refused", "launcher"]}


def test_nothing_is_silently_left_out(tiny: Planned) -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "FSDP_VERSION": "2",
        "SLURM_JOB_ID": "1",
        "SLURM_PROCID": "0",
        "HF_DATASETS_OFFLINE": "1",
        "PATH": "/bin",
    }
    (source,) = environment.read(tiny.recipe, {**NOWHERE, **environ})
    assert source.only_there == [
        *("HF_DATASETS_OFFLINE", "HF_HOME", "NCCL_DEBUG"),
        *("FSDP_VERSION", "SLURM_* (2)"),
    ]


def test_offline_and_a_recipe_that_needs_the_hub() -> None:
    path = TINY.parent.parent / "llama/llama-3.2-1b-sft.yaml"
    planned = Planned.of(path)
    (source,) = environment.read(planned.recipe, {**NOWHERE, "HF_HUB_OFFLINE": "1"})
    rows = compare(source, facts(planned.recipe, planned.plan)).compared
    assert {(row.key, row.verdict) for row in rows} >= {
        ("model.hub", "open"),
        ("data.tokenizer", "open"),
    }


@pytest.fixture
def stray(tmp_path: Path) -> dict[str, str]:
    """A forgotten config file where Accelerate looks for one unasked."""
    folder = tmp_path / "hf" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text(FSDP)
    return {"HF_HOME": str(tmp_path / "hf")}


def test_a_stray_accelerate_cache_is_found(tiny: Planned, stray: dict[str, str]) -> None:
    """axolotl#394: such a file switched FSDP on."""
    found = conflicts(tiny, stray, "launch")
    assert found["distributed_type"] == ("parallel.engine", "deepspeed", "recipe")
    assert found["mixed_precision"] == ("training.precision", "fp32", "recipe")
    # What it says has become variables in a worker of accelerate's launcher.
    assert conflicts(tiny, stray, "worker") == {}


def test_accelerates_cache_is_where_accelerate_looks(tmp_path: Path) -> None:
    folder = tmp_path / "huggingface" / "accelerate"
    folder.mkdir(parents=True)
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    assert environment.default_config(cache) is None
    (folder / "default_config.json").write_text("{}")
    assert environment.default_config(cache) == folder / "default_config.json"
    (folder / "default_config.yaml").write_text(FSDP)
    assert environment.default_config(cache) == folder / "default_config.yaml"
    assert environment.default_config({**cache, "HF_HOME": str(tmp_path / "other")}) is None


def test_a_broken_accelerate_cache_stops_nothing(tiny: Planned, stray: dict[str, str]) -> None:
    file = environment.default_config(stray)
    assert file is not None
    file.write_text("a: [")
    assert conflicts(tiny, stray, "launch") == {}
    _, source = environment.read(tiny.recipe, stray)
    assert source.unknown


ON_GPUS = ("cluster.gpu=h100-80gb", "training.precision=fp32")


@pytest.mark.parametrize(
    ("starting", "overrides", "environ"),
    [
        ("launch", ON_GPUS, {"CUDA_VISIBLE_DEVICES": "0"}),
        ("launch", ON_GPUS, {"CUDA_VISIBLE_DEVICES": ""}),
        ("launch", ON_GPUS, {"DS_ACCELERATOR": "cpu"}),
        ("worker", ON_GPUS, {"DS_ACCELERATOR": "cpu"}),
        ("worker", (), {"DS_ACCELERATOR": "cuda"}),
        ("worker", ON_GPUS, {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}),
        # Its one agent would wait for a second one for ever (torch 2.13).
        ("launch", ("launch.launcher=torchrun",), {"PET_NNODES": "2"}),
    ],
    ids=str,
)
def test_what_would_break_is_refused(
    starting: Starting,
    overrides: tuple[str, ...],
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = Planned.of(TINY, *overrides)
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    preflight(planned.recipe, planned.plan, starting, pytest.fail)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(PlanError) as caught:
        preflight(planned.recipe, planned.plan, starting, pytest.fail)
    assert next(iter(environ)) in caught.value.message
    assert caught.value.fix


def test_what_the_recipe_overrides_is_told_in_one_line(
    tiny: Planned, stray: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", stray["HF_HOME"])
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    told: list[str] = []
    preflight(tiny.recipe, tiny.plan, "launch", told.append)
    (line,) = told
    assert "ACCELERATE_MIXED_PRECISION=fp16 (training.precision is fp32)" in line
    assert f"{stray['HF_HOME']}/accelerate/default_config.yaml:2 distributed_type=FSDP" in line
    assert "the recipe takes precedence" in line
    assert "\n" not in line
