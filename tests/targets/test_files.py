"""What each kind of file says that DMT does not write itself, and files of no kind."""

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate import FullyShardedDataParallelPlugin
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from tests.targets.conftest import TINY, Planned
from toolkit.errors import RecipeError
from toolkit.targets.compare import Report


def read(tiny: Planned, folder: Path, text: str, name: str) -> Report:
    file = folder / name
    file.write_text(text)
    return tiny.against(file)


def told(report: Report) -> dict[str, tuple[str, str, str]]:
    """By the other's name: our key, the verdict, and its line."""
    return {
        row.name: (row.key, row.verdict, row.place.rpartition(":")[2])
        for row in report.compared
    }


TRAINER = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.003,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 0.1,
    "max_steps": 200,
    "num_train_epochs": 3.0,
    "bf16": True,
    "fp16": False,
    "max_grad_norm": 0.0,
    "optim": "lion_32bit",
    "eval_strategy": "no",
    "save_strategy": "epoch",
    "save_steps": 500,
    "gradient_checkpointing": True,
    "report_to": ["tensorboard"],
    "deepspeed": {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"},
    "learning_rat": 1.0,
    "hub_token": "<HUB_TOKEN>",
    "eval_steps": None,
}


def test_training_arguments(tiny: Planned, tmp_path: Path) -> None:
    report = read(tiny, tmp_path, json.dumps(TRAINER, indent=2), "training_args.json")
    assert told(report) == {
        "per_device_train_batch_size": ("training.micro_batch_size", "disagrees", "3"),
        "gradient_accumulation_steps": ("gradient_accumulation", "disagrees", "4"),
        "per_device_train_batch_size · gradient_accumulation_steps · dp": (
            "training.global_batch_size",
            "agrees",
            "3",
        ),
        "learning_rate": ("optimizer.learning_rate", "agrees", "5"),
        "lr_scheduler_type": ("schedule.name", "disagrees", "6"),
        "warmup_steps": ("schedule.warmup_steps", "agrees", "7"),  # a tenth of 200
        "max_steps": ("training.steps", "agrees", "8"),
        "bf16": ("training.precision", "disagrees", "10"),
        "fp16": ("training.precision", "agrees", "11"),
        "max_grad_norm": ("optimizer.clip_grad_norm", "disagrees", "12"),
        "optim": ("optimizer.name", "disagrees", "13"),
        "eval_strategy": ("evaluation.every_steps", "disagrees", "14"),
        "gradient_checkpointing": ("parallel.recompute", "disagrees", "17"),
        "report_to": ("logging.tensorboard", "disagrees", "18"),
        "deepspeed": ("parallel.engine", "agrees", "21"),
        "deepspeed.zero_optimization.stage": ("parallel.zero.stage", "agrees", "23"),
        "deepspeed.train_batch_size": ("training.global_batch_size", "auto", "25"),
    }
    (typo,) = report.unknown
    assert (typo.name, typo.hint) == ("learning_rat", "did you mean `learning_rate`?")
    assert {"output_dir", "save_strategy", "hub_token"} <= {*report.source.only_there}


def test_the_advice_can_be_followed(tiny: Planned, tmp_path: Path) -> None:
    report = read(tiny, tmp_path, json.dumps(TRAINER, indent=2), "training_args.json")
    advice = {row.name: row.advice for row in report.conflicts}
    where = f"{tmp_path}/training_args.json"
    assert advice["bf16"] == f"--set training.precision=bf16, or change bf16 at {where}:10"
    # No recipe can say this.
    assert advice["optim"] == (
        f"change optim at {where}:13 to mean optimizer.name adamw, or change the recipe"
    )


def test_a_deepspeed_file_that_training_arguments_name(tiny: Planned, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    text = json.dumps({"output_dir": "out", "deepspeed": "ds.json"})
    report = read(tiny, tmp_path, text, "args.json")
    stage = told(report)["zero_optimization.stage"]
    assert stage == ("parallel.zero.stage", "disagrees", "1")
    (row,) = report.conflicts
    assert row.place == f"{tmp_path}/ds.json:1"


def test_what_deepspeed_translates_drops_and_refuses(tiny: Planned, tmp_path: Path) -> None:
    """The older offload switches count (DeepSpeed 0.19); a block of settings drops nothing."""
    zero = {"stage": 2, "cpu_offload": True, "cpu_offload_param": False, "xyz": 1}
    text = json.dumps({"zero_optimization": zero, "xyz": 1, "bf16": True}, indent=1)
    report = read(tiny, tmp_path, text, "ds.json")
    assert told(report) == {
        "zero_optimization.stage": ("parallel.zero.stage", "agrees", "3"),
        "zero_optimization.cpu_offload": (
            *("parallel.zero.offload_optimizer", "disagrees", "4"),
        ),
        "zero_optimization.cpu_offload_param": (
            *("parallel.zero.offload_parameters", "agrees", "5"),
        ),
    }
    assert {one.name: one.hint for one in report.unknown} == {
        "xyz": "DeepSpeed drops it silently",
        "zero_optimization.xyz": "DeepSpeed refuses it",
        "bf16": "not an object: { … }",
    }
    assert DeepSpeedZeroConfig(stage=2, cpu_offload=True).offload_optimizer.device == "cpu"
    with pytest.raises(ValueError, match="xyz"):
        DeepSpeedZeroConfig(xyz=1)


@pytest.mark.parametrize(
    ("text", "key", "verdict"),
    [
        ("num_train_epochs: 2", "training.epochs", "open"),  # the recipe counts steps
        ("tf32: true\nbf16: false\nfp16: false", "training.precision", "disagrees"),
        ("warmup_ratio: 0.05", "schedule.warmup_steps", "open"),
        ("fsdp: full_shard", "parallel.zero.stage", "disagrees"),
        ("lr_scheduler_kwargs: {min_lr: 1.0e-9}", "schedule.min_learning_rate", "disagrees"),
    ],
)
def test_more_training_arguments(
    text: str, key: str, verdict: str, tiny: Planned, tmp_path: Path
) -> None:
    report = read(tiny, tmp_path, f"output_dir: x\n{text}\n", "args.yaml")
    last = report.compared[-1]
    assert (last.key, last.verdict) == (key, verdict)
    assert bool(last.advice) == (verdict != "agrees")


@pytest.mark.parametrize(
    ("fsdp", "config", "found"),
    [
        (True, {}, {"parallel.zero.stage": "3"}),
        ("shard_grad_op offload", {}, {"parallel.zero.offload_parameters": "cpu"}),
        (
            True,
            {"fsdp_reshard_after_forward": False, "activation_checkpointing": True},
            {"parallel.recompute": "full"},
        ),
        (["full_shard"], {"reshard_after_forward": False, "cpu_offload": False}, {}),
        (
            True,
            {"version": 1, "reshard_after_forward": "full_shard"},
            {"parallel.engine": "1", "parallel.zero.stage": "full_shard"},
        ),
        (False, {"version": 1}, {}),
    ],
    ids=str,
)
def test_fsdp_in_training_arguments(
    fsdp: object, config: dict[str, Any], found: dict[str, str], tmp_path: Path
) -> None:
    """The recipe keeps gathered parameters until the backward pass: stage 2."""
    planned = Planned.of(TINY, "parallel.engine=fsdp", "parallel.zero.stage=2")
    arguments = {"output_dir": "out", "fsdp": fsdp, "fsdp_config": config}
    report = read(planned, tmp_path, json.dumps(arguments, indent=1), "args.json")
    written = {"3": "true", "cpu": fsdp, "full": "true"}
    assert {row.key: row.other for row in report.conflicts} == {
        key: written.get(value, value) for key, value in found.items()
    }
    assert not report.unknown


def test_fsdp_in_a_file_of_its_own(tiny: Planned, tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text('{"cpu_offlod": true, "fsdp_version": 2}')
    text = json.dumps({"output_dir": "out", "fsdp": True, "fsdp_config": "fsdp.json"})
    report = read(tiny, tmp_path, text, "args.json")
    (typo,) = report.unknown
    assert (typo.name, typo.hint) == ("cpu_offlod", "did you mean `cpu_offload`?")
    assert told(report)["fsdp_version"] == ("parallel.engine", "disagrees", "1")


ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: fp16
num_processes: 4
use_cpu: true
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: none
  gradient_clipping: 1.0
  gradient_accumulation_steps: auto
  deepspeed_config_fil: ds.json
fsdp_config:
  fsdp_version: {version}
  fsdp_reshard_after_forward: true
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_offload_params: false
"""


def test_accelerate_with_deepspeed(tiny: Planned, tmp_path: Path) -> None:
    text = ACCELERATE.format(kind="DEEPSPEED", version=2)
    report = read(tiny, tmp_path, text, "accelerate.yaml")
    assert told(report) == {
        "distributed_type": ("parallel.engine", "agrees", "2"),
        "mixed_precision": ("training.precision", "disagrees", "3"),
        "num_processes": ("world_size", "disagrees", "4"),
        "use_cpu": ("cluster.gpu", "agrees", "5"),
        "deepspeed_config.zero_stage": ("parallel.zero.stage", "disagrees", "7"),
        "deepspeed_config.offload_optimizer_device": (
            "parallel.zero.offload_optimizer",
            "agrees",
            "8",
        ),
        "deepspeed_config.gradient_clipping": ("optimizer.clip_grad_norm", "agrees", "9"),
        "deepspeed_config.gradient_accumulation_steps": (
            "gradient_accumulation",
            "auto",
            "10",
        ),
    }
    winners = {row.name: row.winner for row in report.conflicts}
    assert winners["num_processes"] == "refused"
    assert winners["mixed_precision"] == "recipe"
    (typo,) = report.unknown
    assert typo.hint == "did you mean `deepspeed_config_file`?"
    assert "fsdp_config.fsdp_version (not in effect)" in report.source.only_there


@pytest.mark.parametrize(("version", "stage"), [(1, "agrees"), (2, "disagrees")])
def test_accelerate_with_fsdp(version: int, stage: str, tiny: Planned, tmp_path: Path) -> None:
    """Version 1 shards by its strategy, here gradients only; version 2 by resharding."""
    text = ACCELERATE.format(kind="FSDP", version=version)
    report = read(tiny, tmp_path, text, "accelerate.yaml")
    verdicts = [row.verdict for row in report.compared if row.key == "parallel.zero.stage"]
    assert verdicts == [stage]
    engines = [row.verdict for row in report.compared if row.key == "parallel.engine"]
    assert engines == ["disagrees", "disagrees"]


@pytest.mark.parametrize(
    ("version", "verdict"), [("", "disagrees"), ("\n  fsdp_version: 2", "agrees")]
)
def test_fsdp_without_a_version_is_its_first(
    version: str, verdict: str, tmp_path: Path
) -> None:
    planned = Planned.of(TINY, "parallel.engine=fsdp")
    text = f"distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: false{version}\n"
    report = read(planned, tmp_path, text, "accelerate.yaml")
    (row,) = [row for row in report.compared if row.name == "distributed_type"]
    assert row.verdict == verdict
    assert FullyShardedDataParallelPlugin().fsdp_version == 1
    assert ("fsdp_version 2" in row.advice) == (verdict == "disagrees")


@pytest.mark.parametrize(("shards", "verdict"), [(2, "agrees"), (1, "disagrees")])
def test_shards_and_replicas_are_compared_apart(
    shards: int, verdict: str, tiny: Planned, tmp_path: Path
) -> None:
    """Two whole replicas are two data-parallel ranks, but no shards."""
    text = (
        "num_processes: 2\nparallelism_config:\n"
        f"  parallelism_config_dp_shard_size: {shards}\n"
        f"  parallelism_config_dp_replicate_size: {2 // shards}\n"
    )
    found = told(read(tiny, tmp_path, text, "accelerate.yaml"))
    sizes = "parallelism_config.parallelism_config_dp_"
    assert found[f"{sizes}shard_size"] == ("shards", verdict, "3")
    assert found[f"{sizes}replicate_size"] == ("replicas", verdict, "4")


def test_accelerate_with_deepspeeds_json_inside(tiny: Planned, tmp_path: Path) -> None:
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
        '  deepspeed_config_file: |-\n    {\n      "zero_optimization": {"stage": 1}\n    }\n'
    )
    report = read(tiny, tmp_path, text, "accelerate.yaml")
    assert told(report)["zero_optimization.stage"] == ("parallel.zero.stage", "disagrees", "6")


SCRIPT = """\
#!/bin/bash
# Don't forget to set the data path
export TP=2
PP=${TP}
ARGS=(
  --tensor-model-parallel-size $TP
  --pipeline_model_parallel_size ${PP}
  --num-layers 8 --num-layers-per-virtual-pipeline-stage 2
  --lr=3e-3 --optimizer adam --clip-grad 0
  --seq-length $SEQ
  --sequence-parallel
  --global-batch-siz 16
)
torchrun --nproc_per_node 2 pretrain_gpt.py "${ARGS[@]}" \\
  --train-iters 200 --lr-warmup-iters 20 --weight-decay 0.1 | tee log.txt
"""


def test_a_script_that_starts_megatron(tiny: Planned, tmp_path: Path) -> None:
    report = read(tiny, tmp_path, SCRIPT, "train.sh")
    assert told(report) == {
        "--tensor-model-parallel-size": ("parallel.tensor", "disagrees", "6"),
        "--pipeline_model_parallel_size": ("parallel.pipeline", "disagrees", "7"),
        "--num-layers": ("megatron.num_layers", "disagrees", "8"),
        "--num-layers-per-virtual-pipeline-stage": (
            "parallel.virtual_pipeline",
            "disagrees",
            "8",
        ),
        "--lr": ("optimizer.learning_rate", "agrees", "9"),
        "--optimizer": ("optimizer.name", "agrees", "9"),
        "--clip-grad": ("optimizer.clip_grad_norm", "disagrees", "9"),
        "--seq-length": ("training.sequence_length", "open", "10"),
        "--sequence-parallel": ("parallel.sequence", "disagrees", "11"),
        "--nproc_per_node": ("cluster.gpus_per_node", "agrees", "14"),
        "--train-iters": ("training.steps", "agrees", "15"),
        "--lr-warmup-iters": ("schedule.warmup_steps", "agrees", "15"),
        "--weight-decay": ("optimizer.weight_decay", "agrees", "15"),
    }
    (typo,) = report.unknown
    assert typo.hint == "did you mean `--global-batch-size`?"
    (switch,) = [row for row in report.conflicts if row.name == "--sequence-parallel"]
    assert (switch.recipe, switch.other) == ("false", "given")
    assert switch.advice.startswith("remove `--sequence-parallel` at ")
    assert report.source.only_there == ()


def test_a_flag_by_another_tools_name(tiny: Planned, tmp_path: Path) -> None:
    report = read(tiny, tmp_path, "--tp-size 2\n--eod-mask-loss\n", "args.txt")
    (other,) = report.unknown
    assert "parallel.tensor" in other.hint
    assert report.source.only_there == ("--eod-mask-loss",)


def test_the_shape_of_a_wsd_decay_is_compared(tiny: Planned, tmp_path: Path) -> None:
    flags = "--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt\n"
    found = told(read(tiny, tmp_path, flags, "args.txt"))
    assert found["--lr-wsd-decay-style"] == ("schedule.decay", "disagrees", "1")
    assert found["--lr-decay-style"] == ("schedule.name", "disagrees", "1")


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.json", b"[1]", "a text without"),
        ("a.json", b'{"a": 1', "JSON"),
        ("a.json", b'{"a": 1}', "settings a"),
        ("a.json", b'{"train_batch_size": 1, "train_batch_size": 2}', "stated again"),
        ("a.yaml", b"- 1", "no map"),
        ("a.yaml", b"a: [", "YAML"),
        ("a.yaml", b"name: x\nmodel: {}\ntraining: {}", "a recipe"),
        ("a.txt", b"hello", "without `--flags`"),
        ("a.txt", b"--lr 'never ends\n", "does not end"),
        ("a.txt", b"\xff\xfe\x00", "utf-8"),
        ("a.txt", b"", "without `--flags`"),
        ("missing", None, "No such file"),
        (".", None, "directory"),
        ("a.txt", b"x" * 300_000, "more than 256 KiB"),
    ],
)
def test_no_kind_of_file(
    name: str, content: bytes | None, found: str, tiny: Planned, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        tiny.against(tmp_path / name)
    (problem,) = caught.value.problems
    assert found in f"{problem.found} {problem.allowed}"
    assert problem.file == str(tmp_path / name)


def test_without_a_plan_what_is_auto_is_open(tmp_path: Path, tiny: Planned) -> None:
    unplanned: Any = Planned(tiny.recipe, None)  # type: ignore[arg-type]
    text = '{"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}'
    verdicts = {
        row.name: row.verdict for row in read(unplanned, tmp_path, text, "a.json").compared
    }
    assert verdicts == {"zero_optimization.stage": "open", "gradient_clipping": "disagrees"}
