"""`dmt check --against`: what DMT renders agrees, and one changed word is found."""

import json
import os
from pathlib import Path

import pytest

from tests.dmt import Dmt
from tests.foreign.conftest import FILES, TINY, Planned
from tests.processes import ROOT
from toolkit.backend import BACKENDS
from toolkit.engines.deepspeed.keys import OWNED
from toolkit.errors import PlanError
from toolkit.foreign.accelerate_file import render
from toolkit.foreign.compare import against
from toolkit.foreign.megatron_flags import layout_flags

OTHERWISE = {
    "train_batch_size": 999,
    "train_micro_batch_size_per_gpu": 99,
    "gradient_accumulation_steps": 77,
    "gradient_clipping": 0.5,
    "bf16.enabled": True,
    "fp16.enabled": True,
    "optimizer.type": "Muon",
    "optimizer.params.lr": 1.0,
    "optimizer.params.betas": [0.1, 0.2],
    "optimizer.params.eps": 0.1,
    "optimizer.params.weight_decay": 0.7,
    "zero_optimization.stage": 1,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_optimizer.nvme_path": "/fast",
    "zero_optimization.offload_param.device": "nvme",
    "zero_optimization.offload_param.nvme_path": "/fast",
    "scheduler.params.warmup_num_steps": 21,
    "wandb.project": "another",
}


@pytest.mark.parametrize("key", OTHERWISE)
def test_each_changed_word_of_a_deepspeed_config_is_found(
    key: str, tiny: Planned, tmp_path: Path
) -> None:
    """Nothing else disagrees: the config is what DMT gives to DeepSpeed."""
    assert OWNED.keys() <= OTHERWISE.keys()
    config = BACKENDS[tiny.plan.engine].render(tiny.recipe, tiny.plan.layout)
    *blocks, name = key.split(".")
    block = config
    for step in blocks:
        block = block.setdefault(step, {})
    block[name] = OTHERWISE[key]
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config, indent=1))
    (row,) = [row for row in tiny.against(file).settings if not row.agrees]
    assert row.name == key and row.fix
    assert row.place.startswith(f"{file}:")
    assert row.key in (
        OWNED.get(key),
        "accumulation",
        "schedule.warmup_steps",
        "logging.project",
    )


@pytest.mark.parametrize("recipe", ["tiny/llama-bytes", "llama/llama-3.1-8b-lora"])
@pytest.mark.parametrize("engine", ["deepspeed", "ddp", "fsdp"])
def test_a_rendered_accelerate_file_agrees(recipe: str, engine: str, tmp_path: Path) -> None:
    overrides = (f"parallel.engine={engine}", "parallel.model=hf")
    planned = Planned.of(ROOT / f"recipes/{recipe}.yaml", *overrides)
    file = tmp_path / "accelerate.yaml"
    file.write_text(render(planned.recipe, planned.plan))
    report = planned.against(file)
    assert report.agrees and len(report.settings) >= 3, report


@pytest.mark.parametrize("steps", [100, 50])
def test_an_interval_of_the_whole_run_is_null(steps: int, tmp_path: Path) -> None:
    overrides = ("training.steps=100", "checkpoint.every_steps=null")
    planned = Planned.of(ROOT / "recipes/tiny/llama-bytes.yaml", *overrides)
    file = tmp_path / "arguments.json"
    file.write_text(json.dumps({"report_to": "none", "save_steps": steps, "max_steps": 100}))
    rows = {row.key: row.agrees for row in planned.against(file).settings}
    assert rows["checkpoint.every_steps"] == (steps == 100)


def test_the_layout_of_a_plan_as_megatron_lms_flags(tmp_path: Path) -> None:
    planned = Planned.of(ROOT / "recipes/llama/llama-3.1-405b-pretrain.yaml")
    file = tmp_path / "args.txt"
    file.write_text(layout_flags(planned.recipe, planned.plan))
    report = planned.against(file)
    keys = {row.key for row in report.settings}
    assert {"parallel.tensor", "parallel.pipeline", "parallel.sequence", "parallel.zero.stage",
            "training.global_batch_size", "training.precision"} <= keys  # fmt: skip
    assert report.agrees and not [one for one in report.left if one.changes], report
    with pytest.raises(PlanError, match="engine deepspeed"):
        tiny = Planned.of(TINY)
        layout_flags(tiny.recipe, tiny.plan)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("bf16: false\nfp16: false\nreport_to: none", set()),
        ("bf16: false\nmax_steps: 200\nreport_to: none", set()),
        ("gradient_checkpointing: false\nreport_to: none", set()),
        ("gradient_checkpointing: true\nreport_to: none", {"gradient_checkpointing"}),
        ("warmup_steps: 0.1\nreport_to: none", set()),  # a tenth of 200
        ("num_processes: 4\nmixed_precision: bf16", {"num_processes", "mixed_precision"}),
        ("num_train_epochs: 2\nreport_to: none", set()),  # the recipe counts steps
    ],
)
def test_a_setting(text: str, wrong: set[str], tiny: Planned, tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text(text)
    assert tiny.wrong(file).keys() == wrong


def test_without_a_plan_auto_is_not_compared(tmp_path: Path, tiny: Planned) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}')
    report = against(file, tiny.recipe, None)
    assert {row.key: row.agrees for row in report.settings} == {
        "optimizer.clip_grad_norm": False
    }


def test_auto_and_a_model_agree(tiny: Planned) -> None:
    assert tiny.against(ROOT / "ds_configs/zero2.json").agrees
    rows = tiny.against(FILES / "megatron_lm/qwen3.sh").settings
    other = {row.key: row.other for row in rows if not row.agrees}
    assert (other["parallel.tensor"], other["model.config.hidden_size"]) == ("2", "2560")


def test_what_the_command_prints(
    tmp_path: Path, dmt: Dmt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both values and a fix; names that DeepSpeed does not know; no secret."""
    secret = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    file = tmp_path / "ds.json"
    file.write_text(
        '{\n "gradient_clipping": 0.25,\n "gradient_cliping": 0.1, "wandb": '
        f'{{"project": "{secret}"}}, "zero_optimization": {{"overlap_comm": true}}\n}}'
    )
    printed = dmt("check", TINY, "--against", file, code=2)
    out = " ".join(printed.out.split())
    assert f"{file}:2 optimizer.clip_grad_norm gradient_clipping: 0.25, the recipe 1" in out
    assert (
        f"--set optimizer.clip_grad_norm=0.25, or change gradient_clipping at {file}:2" in out
    )
    assert f"{file}:3 gradient_cliping: DeepSpeed does not know it; did you mean" in out
    assert "ignored (1): zero_optimization.overlap_comm" in out and secret not in printed.out
    (checked,) = json.loads(dmt("check", "--json", TINY, "--against", file, code=2).out)[
        "recipes"
    ]
    (compared,) = checked["against"]
    assert (compared["agrees"], compared["kind"]) == (False, "DeepSpeed")
    file.write_text('{"train_batch_size": 999}')
    line = 1 + TINY.read_text().splitlines().index("  global_batch_size: 16")
    printed = dmt("check", TINY, "--against", file, code=2)
    assert f"train_batch_size: 999, the recipe 16 ({TINY}:{line})" in printed.out
    file.write_text('{"gradient_clipping": 0.25, "steps_per_print": 9}')
    dmt("check", TINY, "--against", file, "--set", "optimizer.clip_grad_norm=0.25")


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.json", b"[1]", "a text without"),
        ("a.json", b'{"a": 1', "JSON"),
        ("a.json", b'{"a": 1}', "settings a"),
        (
            "a.json",
            b'{"train_batch_size": 1, "train_batch_size": 2}',
            "already stated on line 1",
        ),
        ("a.yaml", b"- 1", "no map"),
        ("a.yaml", b"a: [", "YAML"),
        ("a.yaml", b"name: x\nmodel: {}\ntraining: {}", "a recipe"),
        ("a.txt", b"\xff\xfe\x00", "utf-8"),
        ("missing", None, "No such file"),
        (".", None, "directory"),
        ("pipe", None, "no regular file"),
        ("a.txt", b"x" * 300_000, "more than 262144 bytes"),
    ],
)
def test_no_kind_of_file(
    name: str, content: bytes | None, found: str, tmp_path: Path, dmt: Dmt
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    printed = dmt("check", TINY, "--against", tmp_path / name, code=2).err
    assert found in " ".join(printed.split()) and str(tmp_path / name) in printed
