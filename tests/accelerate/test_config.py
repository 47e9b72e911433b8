"""The files for `accelerate launch`, read by Accelerate's own code."""

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from accelerate import DeepSpeedPlugin, ParallelismConfig
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from tests.accelerate.layouts import LAYOUTS
from tests.e2e.product import dmt, run, settings
from tests.processes import ROOT
from toolkit.accelerate.common import FOLDER
from toolkit.accelerate.samples import TrainingSamples
from toolkit.accelerate.scripts import planned_for_launcher
from toolkit.backend import BACKENDS, adopt_engine_config
from toolkit.engines.deepspeed.accelerate import script_config
from toolkit.errors import DataError, PlanError
from toolkit.foreign.accelerate_file import COMMON, in_scripts, render, render_common
from toolkit.foreign.compare import against
from toolkit.intake.load import load_recipe
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import Recipe

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
TINY = ROOT / "recipes" / "tiny" / "llama-bytes.yaml"


def planned(*overrides: str) -> tuple[Recipe, Plan]:
    recipe = adopt_engine_config(load_recipe(TINY, overrides))
    return recipe, plan_recipe(recipe)


def of_layout(name: str, *more: str) -> tuple[Recipe, Plan]:
    return planned(*(f"parallel.{key}={value}" for key, value in LAYOUTS[name].items()), *more)


def read(text: str, folder: Path) -> ClusterConfig:
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
    return arguments


@pytest.mark.parametrize("name", LAYOUTS)
def test_accelerate_reads_what_was_planned(name: str, tmp_path: Path) -> None:
    recipe, plan = of_layout(name)
    config = read(render(recipe, plan), tmp_path)
    kinds = {"ddp": "MULTI_GPU", "deepspeed": "DEEPSPEED", "fsdp": "FSDP"}
    assert config.distributed_type == kinds[plan.engine]
    assert (config.num_machines, config.num_processes, config.use_cpu) == (1, 2, True)
    assert config.mixed_precision == (None if plan.engine == "deepspeed" else "no")
    if plan.engine == "fsdp":
        stated = config.fsdp_config
        assert stated["fsdp_version"] == 2
        assert stated["fsdp_reshard_after_forward"] is (plan.layout.zero_stage == 3)
        offloads = plan.layout.offload_parameters == "cpu"
        assert stated["fsdp_offload_params"] is offloads
        recomputes = plan.layout.recompute == "full"
        assert stated["fsdp_activation_checkpointing"] is recomputes


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.startswith("zero")])
def test_deepspeeds_whole_json_arrives(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, plan = of_layout(name, "optimizer.clip_grad_norm=null")
    arguments = launched(render(recipe, plan), tmp_path)
    arguments.deepspeed_fields_from_accelerate_config = ""
    _, environment = prepare_deepspeed_cmd_env(arguments)
    for variable in environment.keys() - os.environ.keys():
        monkeypatch.setenv(variable, environment[variable])
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
    recipe, plan = of_layout("zero2", f"optimizer.clip_grad_norm={clips_at}")
    text = render(recipe, plan)
    stated = json.loads(read(text, tmp_path).deepspeed_config["deepspeed_config_file"])
    assert f"{plan.layout.micro_batch} per device" in text and f"clips at {clips_at}" in text
    config = HfTrainerDeepSpeedConfig(stated)
    own = TrainingArguments(
        per_device_train_batch_size=3, gradient_accumulation_steps=5, max_grad_norm=clips_at,
        use_cpu=True, bf16=False,
    )  # fmt: skip
    config.trainer_config_process(own)
    assert config.mismatches == []
    assert [config.config[name] for name in BATCH] == [15, 3, 5]
    assert config.config["gradient_clipping"] == clips_at
    own.max_grad_norm = 0.7
    again = HfTrainerDeepSpeedConfig(stated)
    again.trainer_config_process(own)
    assert bool(again.mismatches) == (clips_at != 1.0), "loud, where Accelerate would clip at 1"


def test_one_process_is_no_distributed_run(tmp_path: Path) -> None:
    config = read(render(*of_layout("ddp", "cluster.gpus_per_node=1")), tmp_path)
    assert (config.distributed_type, config.num_processes) == ("NO", 1)


@pytest.mark.parametrize("name", ["ddp", "zero3", "fsdp"])
def test_several_machines_need_their_rank_on_the_command_line(
    name: str, tmp_path: Path
) -> None:
    """With Accelerate's default, 0 on each of them, they wait for each other."""
    prepare = prepare_deepspeed_cmd_env if name == "zero3" else prepare_multi_gpu_env
    text = render(*of_layout(name, "cluster.nodes=2"))
    assert "--machine_rank 0, 1, …" in text.replace("\n# ", " ")
    arguments = launched(text, tmp_path)
    with pytest.raises(ValueError, match="give --machine_rank N on the command line, 0 on"):
        prepare(arguments)
    given = ("--machine_rank", "1", "--main_process_ip", "10.0.0.7")
    arguments = launched(text, tmp_path, *given)
    arguments.deepspeed_fields_from_accelerate_config = ""
    prepare(arguments)
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.node_rank) == ("2", "2", 1)
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint) == ("static", "10.0.0.7:29500")


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.engine=megatron", "parallel.tensor=2", "parallel.zero.stage=auto"),
        ("parallel.model=megatron", "parallel.recompute=selective"),
    ],
)
def test_megatrons_model_is_refused_with_what_works(overrides: tuple[str, ...]) -> None:
    with pytest.raises(PlanError, match=r"megatron-core's model") as caught:
        render(*planned(*overrides))
    words = caught.value.fix.partition(";")[0].split()
    assert set(words[0::2]) == {"--set"}
    recipe, plan = planned(*overrides, *words[1::2])
    assert (plan.engine, plan.model) == ("deepspeed", "hf")
    render(recipe, plan)


@pytest.mark.parametrize(
    "stated",
    ["kernels.loss=chunked", "kernels.compile=layers", "kernels.attention=cudnn"],
)
def test_a_script_has_kernels_of_its_own(stated: str) -> None:
    """What is open is planned as a transformers model does it."""
    on_gpus = ["cluster.gpu=h100-80gb", "training.precision=bf16", "parallel.engine=fsdp"]
    recipe = load_recipe(TINY, on_gpus)
    assert plan_recipe(recipe).layout.compile == "layers"
    layout = plan_recipe(in_scripts(recipe)).layout
    assert (layout.loss, layout.compile) == ("whole", "none")
    key, _, value = stated.partition("=")
    told = f"launch/train.py has {key}: {value}; a script of your own"
    assert told in render(*planned(*on_gpus, stated))
    with pytest.raises(PlanError, match=f"{key}: {value}") as caught:
        planned_for_launcher(
            load_recipe(TINY, [*on_gpus, stated, "cluster.gpus_per_node=1"]), ()
        )
    assert f"--set {key}=auto" in caught.value.fix


def test_logits_of_a_script_must_fit() -> None:
    """A script's plan counts neither on the chunked loss that `dmt launch` has where it must,
    nor on shards that are kept twice."""
    settings = [
        "training.micro_batch_size=4",
        "parallel.engine=fsdp",
        "parallel.recompute=full",
    ]
    recipe = load_recipe(ROOT / "recipes/llama/llama-3.1-8b-pretrain.yaml", settings)
    ours = plan_recipe(recipe).layout
    assert (ours.loss, ours.zero_stage) == ("chunked", 1)
    plan = plan_recipe(in_scripts(recipe))
    assert plan.fits
    assert (plan.layout.loss, plan.layout.zero_stage, plan.layout.replicate) == ("whole", 3, 1)
    assert render(in_scripts(recipe), plan)


def test_scripts_recompute_all_layers_or_none() -> None:
    settings = ["training.micro_batch_size=4", "parallel.engine=deepspeed", "parallel.model=hf"]
    settings += ["parallel.zero.stage=3", "cluster.nodes=1"]
    recipe = load_recipe(ROOT / "recipes/llama/llama-3.1-8b-pretrain.yaml", settings)
    some = plan_recipe(in_scripts(recipe.with_values({"kernels.loss": "whole"})))
    assert some.layout.recompute == "full"
    stated = recipe.with_values({"parallel.recompute": 8})
    with pytest.raises(PlanError, match="recomputes 8 layers, Accelerate's") as told:
        render(in_scripts(stated), plan_recipe(in_scripts(stated)))
    assert "--set parallel.recompute=full" in told.value.fix


@pytest.mark.parametrize("name", COMMON)
def test_the_common_files_are_current_and_read(name: str, tmp_path: Path) -> None:
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    assert text == render_common(name), "python -m toolkit.accelerate.common"
    assert read(text, tmp_path).num_processes == 8


def test_there_are_no_other_files() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(COMMON)


def test_the_verb_writes_the_file(tmp_path: Path) -> None:
    out = tmp_path / "a.yaml"
    changes = settings({"parallel.engine": "fsdp"})
    ended = run(dmt("render", TINY, "--to", "accelerate", "--out", out, *changes), tmp_path)
    assert (ended.code, ended.out) == (0, ""), ended.err
    assert out.read_text(encoding="utf-8") == render(*planned("parallel.engine=fsdp"))


ON_FOUR = (
    "parallel.engine=fsdp",
    "cluster.gpus_per_node=4",
    "cluster.gpu=h100-80gb",
    "training.precision=bf16",
    "kernels.compile=none",
)


def test_accelerate_makes_the_mesh_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of shards on two ranks each."""
    recipe, plan = planned(*ON_FOUR, "parallel.replicate=2")
    text = render(recipe, plan)
    environment = prepare_multi_gpu_env(launched(text, tmp_path))
    for variable in environment.keys() - os.environ.keys():
        monkeypatch.setenv(variable, environment[variable])
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


def test_a_script_does_not_split_sequences() -> None:
    context = (*ON_FOUR, "parallel.context=2")
    with pytest.raises(PlanError, match="context 2, whose positions a script") as caught:
        render(*planned(*context))
    render(*planned(*context, "parallel.context=1"))
    assert "--set parallel.context=1" in caught.value.fix


def test_samples_of_isolated_documents_are_refused() -> None:
    """A loop that passes no positions, or a mask, would cross documents silently."""
    recipe, _ = planned("data.isolate_documents=true")
    with pytest.raises(DataError, match="a forward pass outside `dmt launch` may"):
        TrainingSamples(recipe)
