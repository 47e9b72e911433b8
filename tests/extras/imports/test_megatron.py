"""Weights to Megatron-LM's format and back, by megatron-core's own checkpointing."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.making import write_recipe
from tests.dmt import Dmt
from tests.models.configs import config_of
from tests.models.in_megatron import check, run_cases, save_random_model
from toolkit.errors import CheckpointError, DataError
from toolkit.extras.imports.megatron import HEAD, RELEASE, _check_fit, write_megatron


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {k: v for one in folder.glob("*.safetensors") for k, v in load_file(one).items()}


def project(folder: Path, case: str) -> tuple[Path, Path]:
    """A recipe and a folder with random weights in bf16 of its model."""
    config = config_of(case, vocab_size=320)
    save_random_model(config, folder / "hf")
    halves = {name: one.bfloat16() for name, one in tensors_of(folder / "hf").items()}
    save_file(halves, folder / "hf" / "model.safetensors", {"format": "pt"})
    (folder / "a.txt").write_text("text " * 200)
    recipe = yaml.safe_load(write_recipe(folder).read_text().replace("fp32", "bf16"))
    recipe["model"]["config"] = config
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml", folder / "hf"


def check_equal(folder: Path, hf: Path) -> None:
    ours, theirs = tensors_of(folder), tensors_of(hf)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


@pytest.mark.parametrize(
    "case", ["llama", "gpt2", "gemma2", "qwen2_moe partly dense", "gpt_oss"]
)
def test_there_and_back_is_bit_identical(case: str, tmp_path: Path, dmt: Dmt) -> None:
    recipe, hf = project(tmp_path, case)
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    dmt("checkpoint", "export", hf, megatron, "--to", "megatron")
    dmt("checkpoint", "import", recipe, megatron / RELEASE, "--to", back)
    check_equal(back, hf)


@pytest.mark.slow
def test_any_layout_loads_it_and_what_it_saves_comes_back(tmp_path: Path, dmt: Dmt) -> None:
    """Four real ranks compute transformers' logits from it, and save it."""
    layouts = {
        "llama": {"tp": 2, "pp": 2, "sequence_parallel": True},
        "qwen3_moe": {"tp": 2, "sequence_parallel": True, "dp": 2},
        "qwen2_moe partly dense": {"pp": 2, "dp": 2, "ep": 2},
        "deepseek_v3": {"tp": 2, "sequence_parallel": True, "dp": 2},
    }
    cases = []
    for case, layout in layouts.items():
        _recipe, hf = project(tmp_path / case, case)
        (tmp_path / case / "megatron").mkdir()
        write_megatron(hf, tmp_path / case / "megatron")
        saved = tmp_path / case / "saved"
        cases.append({
            "name": case, "folder": str(hf), "layout": layout,
            "load": str(tmp_path / case / "megatron" / "release"),
            "save": str(saved / "iter_0000007"),
        })  # fmt: skip
    check(run_cases(cases, world=4), cases)
    for case in layouts:
        one, back = tmp_path / case / "saved/iter_0000007", tmp_path / case / "back"
        dmt("checkpoint", "import", tmp_path / case / "recipe.yaml", one, "--to", back)
        ours = tensors_of(back)  # in fp32, as the ranks compute
        for name, tensor in tensors_of(tmp_path / case / "hf").items():
            assert torch.equal(ours[name].bfloat16(), tensor), name


@pytest.mark.slow
def test_a_run_starts_with_them_and_another_model_is_refused(tmp_path: Path, dmt: Dmt) -> None:
    recipe, hf = project(tmp_path, "llama")
    megatron, back, run = tmp_path / "megatron", tmp_path / "back", tmp_path / "run"
    dmt("checkpoint", "export", hf, megatron, "--to", "megatron")
    words = ("checkpoint", "import", recipe, megatron / RELEASE)
    assert "add --to FOLDER" in dmt(*words, code=2).err
    printed = dmt(*words, "--to", back, "--set", "model.config.num_hidden_layers=3", code=2)
    assert "has the shape [4, " in printed.err and "the model's is [3, " in printed.err
    assert not back.exists()
    dmt(*words, "--to", back)
    changed = yaml.safe_load(recipe.read_text())
    changed["model"] = {"hub": str(back), "init": "pretrained"}
    changed["training"]["steps"] = 2
    recipe.write_text(yaml.safe_dump(changed))
    dmt("launch", recipe, "--run-dir", run)
    dmt("checkpoint", "export", run, tmp_path / "again", "--to", "megatron")
    assert (tmp_path / "again" / "release" / ".metadata").is_file()


def test_keys_and_rows_that_do_not_fit(tmp_path: Path) -> None:
    def notes(rows: int, *more: str, columns: int = 64) -> list[str]:
        sizes = {HEAD: (rows, columns)} | dict.fromkeys(more, ())
        return [*_check_fit(tmp_path, sizes, {HEAD: (320, 64)})]

    assert notes(320, "optimizer.state.exp_avg.x", "a.b._extra_state") == []
    assert notes(384) == [f"64 rows of padding in {HEAD} are left out"]
    for rows in (300, 320 + 128 * 64):
        with pytest.raises(
            CheckpointError, match=f"the shape .{rows}, 64., the model's is .32"
        ):
            notes(rows)
    with pytest.raises(CheckpointError, match="320, 63"):
        notes(320, columns=63)
    with pytest.raises(CheckpointError, match="it has more, unlike the model"):
        notes(320, "more")
    with pytest.raises(CheckpointError, match=f"it has no {HEAD}, unlike the model"):
        [*_check_fit(tmp_path, {}, {HEAD: (320, 64)})]


def test_a_head_that_is_not_the_embedding_it_is_tied_to(tmp_path: Path) -> None:
    _, hf = project(tmp_path, "llama tied with biases")
    tensors = tensors_of(hf)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    save_file(tensors | head, hf / "model.safetensors", {})
    with pytest.raises(DataError, match=r"lm_head\.weight is not the same as"):
        write_megatron(hf, tmp_path / "megatron")


def test_dtypes_that_differ(tmp_path: Path) -> None:
    _, hf = project(tmp_path, "llama")
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors = tensors_of(hf)
    save_file(tensors | {name: tensors[name].half()}, hf / "model.safetensors", {})
    with pytest.raises(DataError, match="of BF16, F16; a Megatron checkpoint has one type"):
        write_megatron(hf, tmp_path / "megatron")
