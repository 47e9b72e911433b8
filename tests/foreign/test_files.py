"""What each kind of file says that DMT does not write itself, and files of no kind."""

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate import FullyShardedDataParallelPlugin
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from tests.foreign.conftest import TINY, Planned
from tests.foreign.reading import read, told
from toolkit.errors import RecipeError


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
    assert {one.name: one.hint for one in report.source.unknown} == {
        "xyz": "DeepSpeed drops it silently",
        "zero_optimization.xyz": "DeepSpeed refuses it",
        "bf16": "not an object: { … }",
    }
    assert DeepSpeedZeroConfig(stage=2, cpu_offload=True).offload_optimizer.device == "cpu"
    with pytest.raises(ValueError, match="xyz"):
        DeepSpeedZeroConfig(xyz=1)


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
    (typo,) = report.source.unknown
    assert typo.hint == "did you mean `deepspeed_config_file`?"
    reasons = {one.at.name: one.reason for one in report.source.leftovers}
    assert reasons["fsdp_config.fsdp_version"] == "not in effect: distributed_type is not FSDP"


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


GATHERED = ("parallel.context=2", "kernels.context=all_gather")
CONTEXTS = {
    # Sizes of torch's and DeepSpeed's kind, and the strategy: verdicts of each.
    "torch's": ((2, 1, "allgather"), ("agrees", None, "agrees")),
    "a ring": ((2, 1, "alltoall"), ("agrees", None, None)),
    "another size": ((4, 1, "allgather"), ("disagrees", None, "agrees")),
    "DeepSpeed's": ((1, 2, "allgather"), (None, "disagrees", None)),
    "neither": ((1, 1, "allgather"), ("disagrees", "disagrees", None)),
}


@pytest.mark.parametrize("case", CONTEXTS)
def test_accelerate_states_context_parallel_in_two_ways(case: str, tmp_path: Path) -> None:
    values, verdicts = CONTEXTS[case]
    names = ("cp_size", "sp_size", "cp_comm_strategy")
    planned = Planned.of(TINY, "parallel.engine=fsdp", *GATHERED)
    text = "parallelism_config:\n" + "".join(
        f"  parallelism_config_{name}: {value}\n"
        for name, value in zip(names, values, strict=True)
    )
    report = read(planned, tmp_path, text, "accelerate.yaml")
    found = {row.name.rpartition("_config_")[2]: row for row in report.compared}
    assert tuple(found[name].verdict if name in found else None for name in names) == verdicts
    lines = {name: found[name].place.rpartition(":")[2] for name in found}
    assert lines.items() <= dict(zip(names, "234", strict=True)).items()
    if case == "DeepSpeed's":  # its size agrees, its exchange is another
        assert found["sp_size"].advice.startswith("--set kernels.context=ulysses")


def test_accelerate_with_deepspeeds_json_inside(tiny: Planned, tmp_path: Path) -> None:
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
        '  deepspeed_config_file: |-\n    {\n      "zero_optimization": {"stage": 1}\n    }\n'
    )
    report = read(tiny, tmp_path, text, "accelerate.yaml")
    assert told(report)["zero_optimization.stage"] == ("parallel.zero.stage", "disagrees", "6")


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
