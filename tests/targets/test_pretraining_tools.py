"""Mistakes in files of GPT-NeoX, torchtitan and Megatron-Bridge have a clear answer."""

from pathlib import Path

import pytest

from tests.processes import ROOT
from toolkit.errors import RecipeError
from toolkit.targets.base import SettingSource
from toolkit.targets.files import recognised

PUBLISHED = ROOT / "tests/targets/published"
NEOX, TITAN = "gpt-neox/125M.yml", "torchtitan/llama3_8b.toml"
BRIDGE = "megatron-bridge/train_llama32_1b.sh"


def changed(name: str, old: str, new: str, folder: Path) -> SettingSource:
    """What a published file states after a change."""
    published = PUBLISHED / name
    text = published.read_text()
    assert old in text
    file = folder / published.name
    file.write_text(text.replace(old, new, 1))
    target, parsed = recognised(file, "--from")
    return target.read(parsed, None)


@pytest.mark.parametrize(
    ("name", "old", "new", "hint"),
    [
        (NEOX, '"num_layers"', '"num_layer"', "did you mean `num_layers`?"),
        (NEOX, '"weight_decay"', '"weight_decoy"',
         "did you mean `weight_decay`?"),
        (NEOX, '"hidden_size": 768', '"hidden_size": "wide"', "wide is not a number"),
        (NEOX, '"train_iters": 320000', '"train_iters": many', "many is not a number"),
        (TITAN, "seq_len = 8192", "seq_lens = 8192", "did you mean `seq_len`?"),
        (TITAN, "lr = 3e-4", 'lr = "fast"', "fast is not a number"),
        (TITAN, 'flavor = "8B"', 'flavor = "9B"', "llama3 9B is none of llama3 8B, "),
        (BRIDGE, "scheduler.lr_decay_iters=10", "scheduler.lr_decay_iter=10",
         "did you mean `lr_decay_iters`?"),
        (BRIDGE, "-ms 10", "-ms many", "many is not a number"),
    ],
)  # fmt: skip
def test_a_misspelt_name_and_a_wrong_type_are_named(
    name: str, old: str, new: str, hint: str, tmp_path: Path
) -> None:
    (wrong,) = changed(name, old, new, tmp_path).unknown
    assert wrong.hint.startswith(hint)
    file, _, line = wrong.place.rpartition(":")
    assert (
        new.split()[0].split("=")[0].strip('":')
        in Path(file).read_text().splitlines()[int(line) - 1]
    )


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        (NEOX, '"wall_clock_breakdown": true', '"use_mup": true', "no µP"),
        (NEOX, '"wall_clock_breakdown": true', '"curriculum-learning": {"enabled": true}',
         "data.stages"),
        (NEOX, '"lr_decay_iters": 320000', '"lr_decay_iters": 300000', "every decay ends with"),
        (NEOX, '"lr_decay_style": "cosine"', '"lr_decay_style": "sqrt"', "no sqrt decay"),
        (TITAN, "compile = false", 'compile = false\ndtype = "bfloat16"', "gradients"),
        (TITAN, 'flavor = "8B"', 'flavor = "8B"\nconverters = ["mx"]', "no converter mx"),
        (TITAN, 'name = "AdamW"', 'name = "Adam"', "optimizer.name has other settings"),
        (BRIDGE, "scheduler.lr_decay_iters=10", "mixed_precision=bf16_with_fp8", "fp8 and fp4"),
        (BRIDGE, "scheduler.lr_decay_iters=10", "train.rampup_batch_size=[1,1]", "the g"),
    ],
)  # fmt: skip
def test_what_changes_training_is_named_as_such(
    name: str, old: str, new: str, reason: str, tmp_path: Path
) -> None:
    source = changed(name, old, new, tmp_path)
    reasons = [one.reason for one in source.leftovers]
    assert any(text.startswith(f"changes training: {reason}") for text in reasons), reasons


@pytest.mark.parametrize(
    ("name", "old", "new", "allowed"),
    [
        (NEOX, '"pos_emb": "rotary"', '"pos_emb": "alibi"', "rotary: no model type"),
        (NEOX, '"norm": "layernorm"', '"norm": "scalenorm"', "layernorm or rmsnorm"),
        (NEOX, '"norm": "layernorm"', '"moe_num_experts": 8', "1: its experts"),
        (TITAN, "[training]", "[training", "TOML"),
        (BRIDGE, "llama32_1b_pretrain_config", "gpt_pretrain_config", "llama32_1b_"),
        (BRIDGE, "--mode pretrain", "--mode lora", "llama32_1b_pretrain_config"),
    ],
)  # fmt: skip
def test_what_no_recipe_is_made_of_is_refused(
    name: str, old: str, new: str, allowed: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as error:
        changed(name, old, new, tmp_path)
    assert error.value.problems[0].allowed.startswith(allowed)


def test_torchtitans_python_configs_are_not_run(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("MODULE=llama3 ./run_train.sh --module llama3 --config llama3_8b\n")
    with pytest.raises(RecipeError, match="code is not run"):
        recognised(file, "--from")


def test_gpt_neox_refuses_a_setting_in_two_files() -> None:
    files = [
        recognised(PUBLISHED / f"gpt-neox/{name}.yml", "--from") for name in ("125M", "20B")
    ]
    target = files[0][0]
    with pytest.raises(RecipeError, match="in one of the files"):
        target.join([file for _, file in files])
