"""`dmt check --against` and the check before a start, as a user meets them."""

import json
from pathlib import Path

import pytest

from tests.dmt import Dmt
from tests.foreign.conftest import TINY
from tests.processes import ROOT
from toolkit.errors import PlanError
from toolkit.run.assignment import assign


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Accelerate cache of the developer's own, and a terminal of 80 columns."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-cache"))
    monkeypatch.setenv("COLUMNS", "80")


def test_what_agrees_exits_0(dmt: Dmt) -> None:
    out = dmt("check", TINY, "--against", ROOT / "ds_configs/zero2.json").out
    assert "0 disagree" in out
    assert "recipe fills it" in out
    assert "DMT does not read this file" in out


def test_what_disagrees_exits_2_and_says_what_to_do(tmp_path: Path, dmt: Dmt) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{\n "gradient_clipping": 0.25,\n "zero_optimization": {"stage": 3}\n}')
    captured = dmt("check", TINY, "--against", file, code=2)
    assert captured.err == ""
    out = captured.out
    assert f"{file}:2  optimizer.clip_grad_norm  0.25, the recipe 1 ({TINY}:" in out
    assert f"--set parallel.zero.stage=3, or change zero_optimization.stage at {file}:3" in out
    start = next(n for n, line in enumerate(out.splitlines()) if "precedence" in line)
    table = out.splitlines()[start : start + 6]
    assert max(map(len, table)) <= 80


def test_several_places_and_json(tmp_path: Path, dmt: Dmt) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precison: bf16\n")
    command = ["check", "--json", str(TINY), "--against", str(file), "--against", "env"]
    captured = dmt(*command, code=2)
    assert captured.err == ""
    (checked,) = json.loads(captured.out)["recipes"]
    assert checked["ok"] is False
    assert checked["problems"] == []
    accelerate, env = checked["against"]
    assert accelerate.keys() == {
        "source", "kind", "agrees", "settings", "only_there", "reasons", "unknown",
        "precedence",
    }  # fmt: skip
    assert (accelerate["kind"], accelerate["agrees"]) == ("Accelerate config", False)
    assert accelerate["unknown"][0]["hint"] == "did you mean `mixed_precision`?"
    assert {row["verdict"] for row in accelerate["settings"]} == {"agrees"}
    assert (env["source"], env["agrees"]) == ("env", True)


def test_an_override_counts(tmp_path: Path, dmt: Dmt) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"gradient_clipping": 0.25}')
    command = ["check", str(TINY), "--against", str(file), "--set"]
    dmt(*command, "optimizer.clip_grad_norm=0.25")


def test_a_file_of_no_kind(tmp_path: Path, dmt: Dmt) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")
    printed = dmt("check", TINY, "--against", tmp_path / "notes.txt", code=2).err
    assert f"{tmp_path}/notes.txt  --against" in printed


def test_the_recipes_own_file_shows_both_sides(tmp_path: Path, dmt: Dmt) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"zero_optimization": {"stage": 3}, "train_batch_size": 99}')
    named = ["--set", f"parallel.zero.config={file}"]
    captured = dmt("check", TINY, *named, "--against", file, code=2)
    assert "train_batch_size\n      found    99" in captured.err
    row = next(line for line in captured.out.splitlines() if "global_batch_size" in line)
    assert row.split()[1:] == ["16", "refused"]


def test_a_secret_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmt: Dmt
) -> None:
    secret = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setenv("WANDB_PROJECT", secret)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"wandb": {"project": secret}, "train_batch_size": 16}))
    every = [
        dmt("check", TINY, "--against", "env", code=2),
        dmt("check", TINY, "--against", "env", "--json", code=2),
        dmt("check", TINY, "--against", file, code=2),
        dmt("launch", TINY, "--dry-run"),
    ]
    text = "".join(printed.out + printed.err for printed in every)
    assert "WANDB_PROJECT" in text
    assert "--set logging.wandb.project=" in text
    assert secret not in text


def test_launch_names_a_stray_accelerate_cache(
    tmp_path: Path, dmt: Dmt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """axolotl#394, at `dmt launch`."""
    folder = tmp_path / "hf" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text("distributed_type: FSDP\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    lines = [
        line
        for line in dmt("launch", TINY, "--dry-run").err.splitlines()
        if line.startswith("dmt: ")
    ]
    assert len(lines) == 1
    assert "distributed_type=FSDP (parallel.engine is deepspeed)" in lines[0]


def test_launch_refuses_what_would_hang(dmt: Dmt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    command = ["launch", str(TINY), "--launcher", "torchrun", "--dry-run"]
    captured = dmt(*command, code=2)
    assert "PET_NNODES=2 (cluster.nodes is 1)" in captured.err
    assert captured.out == ""


def test_a_worker_refuses_before_it_writes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    with pytest.raises(PlanError, match="DS_ACCELERATOR=cuda"):
        assign(TINY, (), tmp_path / "run", ["train.py"], world=2)
    assert not (tmp_path / "run").exists()
