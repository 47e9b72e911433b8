"""The files for `accelerate launch`, read by Accelerate's own code."""

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from accelerate import DeepSpeedPlugin, ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from tests.e2e.product import dmt, run, settings
from tests.processes import ROOT
from toolkit.accelerate.scripts import planned_for_launcher
from toolkit.backend import BACKENDS, adopt_engine_config
from toolkit.engines.deepspeed.accelerate import script_config
from toolkit.errors import PlanError
from toolkit.foreign.accelerate_file import in_scripts, render
from toolkit.foreign.compare import against
from toolkit.intake.load import load_recipe
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import Recipe

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
TINY = ROOT / "recipes" / "tiny" / "llama-bytes.yaml"
LLAMA = ROOT / "recipes" / "llama" / "llama-3.1-8b-pretrain.yaml"
FSDP = "parallel.engine=fsdp"
ON_GPUS = [FSDP, "cluster.gpu=h100-80gb", "training.precision=bf16"]
ON_FOUR = [*ON_GPUS, "cluster.gpus_per_node=4", "kernels.compile=none"]
ZERO = {
    "2": ["zero.stage=2"],
    "2 offload": ["zero.stage=2", "zero.offload_optimizer=cpu"],
    "3 nvme": [
        "zero.stage=3",
        "zero.offload_optimizer=nvme",
        "zero.offload_parameters=nvme",
        "zero.nvme_path='/local nvme: {x} #1'",
    ],
}


def planned(*overrides: str) -> tuple[Recipe, Plan]:
    recipe = adopt_engine_config(load_recipe(TINY, overrides))
    return recipe, plan_recipe(recipe)


def zero(stage: str, *more: str) -> tuple[Recipe, Plan]:
    return planned("parallel.engine=deepspeed", *(f"parallel.{x}" for x in ZERO[stage]), *more)


def read(text: str, folder: Path) -> Any:
    """What Accelerate reads of a file; it refuses unknown keys."""
    file = folder / "accelerate.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config_from_file(str(file))


def launched(text: str, folder: Path, *options: str) -> Namespace:
    """The arguments that `accelerate launch --config_file` ends up with."""
    read(text, folder)
    file = str(folder / "accelerate.yaml")
    parsed = launch_command_parser().parse_args(["--config_file", file, *options, "x.py"])
    arguments: Namespace = _validate_launch_command(parsed)[0]
    arguments.deepspeed_fields_from_accelerate_config = ""
    return arguments


def adopt(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in environment.keys() - os.environ.keys():
        monkeypatch.setenv(variable, environment[variable])


@pytest.mark.parametrize(("stage", "offload"), [(3, "cpu"), (2, "none")])
def test_accelerate_reads_the_planned_fsdp(stage: int, offload: str, tmp_path: Path) -> None:
    layout = [f"parallel.zero.stage={stage}", f"parallel.zero.offload_parameters={offload}"]
    recipe, plan = planned(FSDP, *layout, "parallel.recompute=full")
    config = read(render(recipe, plan), tmp_path)
    assert (config.distributed_type, config.mixed_precision) == ("FSDP", "no")
    assert (config.num_machines, config.num_processes, config.use_cpu) == (1, 2, True)
    stated = config.fsdp_config
    assert stated["fsdp_version"] == 2
    assert stated["fsdp_reshard_after_forward"] is (stage == 3)
    assert stated["fsdp_offload_params"] is (offload == "cpu")
    assert stated["fsdp_activation_checkpointing"] is True


@pytest.mark.parametrize(("gpus", "kind"), [(1, "NO"), (2, "MULTI_GPU")])
def test_replicas_are_accelerates_default(gpus: int, kind: str, tmp_path: Path) -> None:
    changes = ("parallel.engine=ddp", f"cluster.gpus_per_node={gpus}")
    config = read(render(*planned(*changes)), tmp_path)
    assert (config.distributed_type, config.num_processes) == (kind, gpus)


@pytest.mark.parametrize("stage", ZERO)
def test_deepspeeds_whole_json_arrives(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, plan = zero(stage, "optimizer.clip_grad_norm=null")
    _, environment = prepare_deepspeed_cmd_env(launched(render(recipe, plan), tmp_path))
    adopt(environment, monkeypatch)
    plugin = DeepSpeedPlugin()
    expected = dict(script_config(BACKENDS[plan.engine].render(recipe, plan.layout)))
    assert "optimizer" not in expected and "auto" not in json.dumps(expected)
    expected |= dict.fromkeys(BATCH, "auto")
    found: dict[str, Any] = plugin.deepspeed_config
    assert found.pop("steps_per_print") == float("inf")  # Accelerate's own
    del expected["steps_per_print"]
    assert found == expected
    assert found["gradient_clipping"] == 0.0, "DeepSpeed's default would be 1.0"
    assert plugin.zero3_init_flag is (plan.layout.zero_stage == 3)


@pytest.mark.parametrize("clips_at", [1.0, 0.5])
def test_a_trainer_of_your_own_states_batch_and_clipping(
    clips_at: float, tmp_path: Path
) -> None:
    """TRL's scripts too: with numbers in the file, they would have to state the same."""
    recipe, plan = zero("2", f"optimizer.clip_grad_norm={clips_at}")
    text = render(recipe, plan)
    stated = json.loads(read(text, tmp_path).deepspeed_config["deepspeed_config_file"])
    assert f"{plan.layout.micro_batch} per device" in text and f"clips at {clips_at}" in text
    own = TrainingArguments(
        per_device_train_batch_size=3, gradient_accumulation_steps=5, max_grad_norm=clips_at,
        use_cpu=True, bf16=False,
    )  # fmt: skip
    config = HfTrainerDeepSpeedConfig(stated)
    config.trainer_config_process(own)
    assert config.mismatches == []
    assert [config.config[name] for name in BATCH] == [15, 3, 5]
    assert config.config["gradient_clipping"] == clips_at
    own.max_grad_norm = 0.7
    again = HfTrainerDeepSpeedConfig(stated)
    again.trainer_config_process(own)
    assert bool(again.mismatches) == (clips_at != 1.0), "loud, where Accelerate would clip at 1"


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_several_machines_need_their_rank_on_the_command_line(
    engine: str, tmp_path: Path
) -> None:
    """With Accelerate's default, 0 on each of them, they wait for each other."""
    prepare = prepare_deepspeed_cmd_env if engine == "deepspeed" else prepare_multi_gpu_env
    text = render(*planned(f"parallel.engine={engine}", "cluster.nodes=2"))
    assert "--machine_rank 0, 1, …" in text.replace("\n# ", " ")
    with pytest.raises(ValueError, match="give --machine_rank N on the command line, 0 on"):
        prepare(launched(text, tmp_path))
    given = ("--machine_rank", "1", "--main_process_ip", "10.0.0.7")
    arguments = launched(text, tmp_path, *given)
    prepare(arguments)
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.node_rank) == ("2", "2", 1)
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint) == ("static", "10.0.0.7:29500")


def test_accelerate_makes_the_mesh_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of shards on two ranks each."""
    recipe, plan = planned(*ON_FOUR, "parallel.replicate=2")
    adopt(prepare_multi_gpu_env(launched(render(recipe, plan), tmp_path)), monkeypatch)
    found = ParallelismConfig()
    sizes = (found.dp_replicate_size, found.dp_shard_size, found.cp_size, found.tp_size)
    assert (sizes, found.total_size) == ((2, 2, 1, 1), 4)
    report = against(tmp_path / "accelerate.yaml", recipe, plan)
    assert report.agrees, report
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert planned_for_launcher(recipe, ())[1].layout == plan.layout
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "8")
    with pytest.raises(PlanError, match="is configured for a parallelism_config"):
        planned_for_launcher(recipe, ())


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["parallel.engine=megatron", "parallel.tensor=2"], "planned as megatron dp1 tp2"),
        (
            ["parallel.model=megatron", "parallel.recompute=selective"],
            "planned as deepspeed/megatron",
        ),
        ([*ON_FOUR, "parallel.context=2"], "planned as .* cp2"),
    ],
)
def test_what_a_script_cannot_run_is_refused_with_what_works(
    overrides: list[str], why: str
) -> None:
    with pytest.raises(PlanError, match=why) as caught:
        render(*planned(*overrides))
    words = caught.value.fix.partition(";")[0].split()
    assert set(words[0::2]) == {"--set"}
    assert render(*planned(*overrides, *words[1::2]))


@pytest.mark.parametrize("stated", ["kernels.loss=chunked", "kernels.attention=cudnn"])
def test_a_script_has_kernels_of_its_own(stated: str) -> None:
    """What is open is planned as a transformers model does it."""
    recipe = load_recipe(TINY, ON_GPUS)
    assert plan_recipe(recipe).layout.compile == "layers"
    layout = plan_recipe(in_scripts(recipe)).layout
    assert (layout.loss, layout.compile) == ("whole", "none")
    key, _, value = stated.partition("=")
    told = f"launch/train.py has {key}: {value}; a script of your own"
    assert told in render(*planned(*ON_GPUS, stated))
    alone = load_recipe(TINY, [*ON_GPUS, stated, "cluster.gpus_per_node=1"])
    with pytest.raises(PlanError, match=f"{key}: {value}") as caught:
        planned_for_launcher(alone, ())
    assert f"--set {key}=auto" in caught.value.fix


def test_logits_and_recompute_of_a_script_must_fit() -> None:
    """A script's plan counts neither on the chunked loss that `dmt launch` has where it must,
    nor on shards that are kept twice; and a script recomputes all layers or none."""
    more = ["training.micro_batch_size=4", FSDP, "parallel.recompute=full"]
    recipe = load_recipe(LLAMA, more)
    assert plan_recipe(recipe).layout.loss == "chunked"
    plan = plan_recipe(in_scripts(recipe))
    assert plan.fits
    assert (plan.layout.loss, plan.layout.zero_stage, plan.layout.replicate) == ("whole", 3, 1)
    assert render(in_scripts(recipe), plan)
    stated = in_scripts(recipe.with_values({"parallel.recompute": 8}))
    with pytest.raises(PlanError, match="recomputes 8 layers, which") as told:
        render(stated, plan_recipe(stated))
    assert "--set parallel.recompute=full" in told.value.fix


def test_the_verb_prints_the_file(tmp_path: Path) -> None:
    changes = settings({"parallel.engine": "fsdp"})
    ended = run(dmt("render", TINY, "--to", "accelerate", *changes), tmp_path)
    assert ended.code == 0, ended.err
    assert ended.out == render(*planned(FSDP))
