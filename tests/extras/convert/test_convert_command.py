"""`dmt convert`, on real folders."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.dmt import Dmt
from tests.extras.convert.converting import assert_same_model
from tests.models.configs import config_of
from tests.models.in_megatron import save_random_model


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    save_random_model(config_of("qwen2"), tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.slow
def test_both_directions_verified(
    qwen2: Path, tmp_path: Path, dmt: Dmt, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, visible = subprocess.run, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        visible.append(kwargs["env"]["CUDA_VISIBLE_DEVICES"])
        return run(*args, **kwargs)

    monkeypatch.setattr(subprocess, "run", watched)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    megatron, back = str(tmp_path / "megatron"), str(tmp_path / "back")
    said = dmt("convert", qwen2, megatron, "--verify", "--json").json
    assert said["direction"] == "huggingface to megatron"
    assert 0 <= said["verify"]["max_abs_difference"] <= said["verify"]["bound"] < 1e-3
    assert visible == [""], "both sides compute on the CPU, also where there is a GPU"
    out, err = dmt("convert", megatron, back)
    assert "megatron to huggingface: qwen2" in out and "GB/s" in out
    assert "note: 27 rows of padding beyond vocab_size (101) are left out" in err
    assert_same_model(Path(back), qwen2)


@pytest.mark.slow
def test_verify_names_a_wrong_result(qwen2: Path, tmp_path: Path, dmt: Dmt) -> None:
    """What a bug in the way back would look like: two tensors exchanged."""
    megatron = tmp_path / "megatron"
    dmt("convert", qwen2, megatron)
    tensors = load_file(qwen2 / "model.safetensors")
    names = json.loads((megatron / "hf" / "tensors.json").read_text())
    gate, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    names[gate], names[up] = up, gate
    (megatron / "hf" / "tensors.json").write_text(json.dumps(names))
    error = dmt("convert", megatron, tmp_path / "back", "--verify", code=4).err
    assert "its logits differ" in error and "Traceback" not in error
    wrong = load_file(tmp_path / "back" / "model.safetensors")
    assert (wrong[gate] == tensors[up]).all()


def test_dry_run_writes_nothing(qwen2: Path, tmp_path: Path, dmt: Dmt) -> None:
    out = dmt("convert", qwen2, tmp_path / "out", "--dry-run").out
    assert "huggingface to megatron: qwen2" in out and f"would write {tmp_path}/out" in out
    assert [f.name for f in tmp_path.iterdir()] == ["hf"]


def test_mistakes_are_one_message(qwen2: Path, tmp_path: Path, dmt: Dmt) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    for arguments, words in (
        ([str(qwen2), str(tmp_path / "full")], "not empty"),
        ([str(tmp_path / "nowhere"), str(tmp_path / "out")], "is not a folder"),
        (["meta-llama/Llama-3.2-1B", str(tmp_path / "out")], "--local-dir"),
        ([str(qwen2), "/proc"], "is a mount point"),
        ([str(tmp_path / "full"), str(tmp_path / "out")], "neither a Hugging Face model"),
        ([str(qwen2), str(tmp_path / "out"), "--vocab-multiple", "0"], "vocab-multiple"),
        ([str(qwen2), str(tmp_path / "out"), "--config", "x.json"], "leave --config out"),
    ):
        error = dmt("convert", *arguments, code=2).err
        assert words in error and "Traceback" not in error


def test_weights_that_are_cut_short(qwen2: Path, tmp_path: Path, dmt: Dmt) -> None:
    weights = qwen2 / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert "Traceback" not in dmt("convert", qwen2, tmp_path / "out", code=2).err
    assert not (tmp_path / "out").exists()


def test_example_in_the_help_is_a_folder(dmt: Dmt) -> None:
    words = " ".join(dmt("convert", "--help").out.split())
    assert "dmt convert ./" in words and ".DST.partial-" in words


def test_control_characters_of_a_config_do_not_reach_the_terminal(
    tmp_path: Path, dmt: Dmt
) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\u202e"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": evil, evil: evil}))
    shown = "".join(dmt("convert", tmp_path, tmp_path.with_name("out"), code=2))
    assert "owned" in shown and not {"\x1b", "\x07", "\u202e"} & set(shown)
