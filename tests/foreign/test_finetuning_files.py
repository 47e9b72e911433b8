"""LLaMA-Factory's and Axolotl's published configurations: read and planned."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.dmt import Dmt
from tests.processes import ROOT
from toolkit.errors import RecipeError
from toolkit.foreign import against
from toolkit.foreign.base import (
    AUTO,
    Nearest,
    OneOf,
    PerReplica,
    SettingSource,
    ShareOfSteps,
    Target,
)
from toolkit.foreign.facts import DERIVED
from toolkit.foreign.files import recognised
from toolkit.intake.load import load_recipe
from toolkit.plan.planner import plan_recipe

FOLDER = ROOT / "tests/foreign/published"
MACHINE = "1x8xh100-80gb"
MODELS = (
    "meta-llama/Meta-Llama-3-8B-Instruct",
    "NousResearch/Meta-Llama-3.1-8B",
    "NousResearch/Llama-3.2-1B",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
)
CHANGES_TRAINING = {
    "llama-factory/llama3_full_sft": "dataset max_samples template",
    "llama-factory/llama3_lora_dpo": "dataset max_samples template",
    "llama-factory/llama3_lora_pretrain": "max_samples",
    "llama-factory/llama3_lora_sft": "dataset max_samples template",
    "axolotl/llama-3-fft-8b-liger-fsdp": "chat_template special_tokens",
    "axolotl/llama-3-instruct-dpo-lora-8b": "chat_template load_in_8bit special_tokens",
    "axolotl/llama-3-lora-1b": "datasets loss_watchdog_patience loss_watchdog_threshold "
    "special_tokens",
    "axolotl/tiny-llama-pretrain": "",
}
"""What has no counterpart and changes training, of each file."""
SHAPES = {
    "NousResearch/Llama-3.2-1B": "llama-3.2-1b",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "llama-3.2-1b",
}
"""Shipped shapes of the models; 8B for the others."""


def read(path: Path) -> tuple[Target, SettingSource]:
    target, file = recognised(path, "--from")
    return target, target.read(file, None)


def carried(found: SettingSource) -> dict[str, Any]:
    """What a file states of a recipe, by key."""
    return {
        one.key: one.value.value if isinstance(one.value, Nearest) else one.value
        for one in found.stated
        if one.value != AUTO and not isinstance(one.value, OneOf) and one.key not in DERIVED
    }


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files next to data of their kind, and a cache of the hub with the models' shapes."""
    shutil.copytree(FOLDER, tmp_path / "published")
    data = tmp_path / "published/llama-factory/data"
    alpaca = json.dumps([{"instruction": "Who are you?", "output": "A model."}] * 20)
    for name in ("identity.json", "alpaca_en_demo.json"):
        (data / name).write_text(alpaca)
    (data / "c4_demo.jsonl").write_text('{"text": "A document."}\n' * 20)
    answer = [{"from": "gpt", "value": "A model."}]
    asked = [{"from": "human", "value": "Who are you?"}]
    pair = {"conversations": asked, "chosen": answer, "rejected": answer}
    (data / "dpo_en_demo.json").write_text(json.dumps([pair] * 20))
    for hub in MODELS:
        size = SHAPES.get(hub, "llama-3.1-8b")
        shape = next((ROOT / "recipes").glob(f"*/{size}-sft.yaml"))
        repository = tmp_path / "hub" / f"models--{hub.replace('/', '--')}"
        snapshot = repository / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(load_recipe(shape).model.config))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "published"


@pytest.mark.parametrize("name", CHANGES_TRAINING)
def test_a_published_file_is_imported_and_planned(
    name: str, published: Path, tmp_path: Path, dmt: Dmt
) -> None:
    path = published / f"{name}.yaml"
    _, found = read(path)
    assert not found.unknown
    changing = {
        one.at.name for one in found.leftovers if one.reason.startswith("changes training")
    }
    assert changing == {*CHANGES_TRAINING[name].split()}
    lines = path.read_text().splitlines()
    named = {one.at.name for one in (*found.leftovers, *found.stated)}
    keys = [line.partition(":") for line in lines if line and line[0] not in "# "]
    silent = {key for key, _, value in keys if key not in named and value.strip()}
    parts = {"sample_packing", "train_on_inputs", "eval_strategy"}  # of other statements
    assert silent <= parts | {"finetuning_type"}  # full: no adapter

    made = tmp_path / "recipe.yaml"
    printed = dmt("init", "--from", path, "--cluster", MACHINE, "--out", made).err
    assert all(name in printed for name in changing)
    dmt("check", made)
    recipe = load_recipe(made)
    conflicts = against(str(path), recipe, plan_recipe(recipe, explained=False))[0].conflicts
    nearest = {one.key for one in found.stated if isinstance(one.value, Nearest)}
    assert {row.key for row in conflicts} <= nearest


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("stage: dpo\npref_loss: orpo\npref_beta: 0.3", "orpo.beta", 0.3),
        ("stage: dpo", "dpo.beta", 0.1),
        ("stage: sft\nlora_target: [q_proj, v_proj]", "adapter.targets", ["q_proj", "v_proj"]),
        ("base_model: m\nrl: dpo", "dpo.beta", 0.1),
        ("base_model: m\nmicro_batch_size: 2\nbatch_size: 9",
         "training.global_batch_size", PerReplica(8)),
        ("learning_rate: 1.0e-6\nmax_steps: 3\nbeta: 0.2\nloss_type: ipo", "dpo.beta", 0.2),
        ("stage: dpo\npref_loss: ipo\npref_ftx: 0.5", "dpo.sft_weight", 0.5),
        ("stage: sft\nneat_packing: true\npacking: true", "data.packing", "greedy"),
        ("stage: sft\nlora_rank: 4", "adapter.alpha", 8),
        ("stage: sft\nwarmup_steps: 0.1", "schedule.warmup_steps", ShareOfSteps(0.1)),
        ("base_model: m\nrl: ipo\nrl_beta: 0.2", "dpo.beta", 0.2),
        ("base_model: m\nadapter: lora\nlora_r: 4", "adapter.rank", 4),
        ("base_model: m\nsequence_len: 8\ncontext_parallel_size: 2", "parallel.context", 2),
        ("base_model: m\nsequence_len: 8\ngradient_checkpointing: offload",
         "parallel.recompute", "full"),
        ("base_model: m\nlearning_rate: 2.0e-4\ncosine_min_lr_ratio: 0.1",
         "schedule.min_learning_rate", 2e-5),
    ],
)  # fmt: skip
def test_a_setting(text: str, key: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(f"{text}\ndataset: x\n" if "stage" in text else text)
    found = carried(read(tmp_path / "file.yaml")[1])[key]
    assert found == (pytest.approx(value) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("stage: sft\nlora_rnak: 8", "lora_rnak", "did you mean `lora_rank`?"),
        ("stage: sft\nwarmup_ratio: soon", "warmup_ratio", "not a number"),
        ("stage: ppo", "stage", "stages are pt, sft and dpo"),
        ("stage: sft\nfinetuning_type: freeze", "finetuning_type", "model.freeze"),
        ("stage: sft\nquantization_bit: 4", "quantization_bit", "quantized"),
        ("stage: sft\nneftune_noise_alpha: 5", "neftune_noise_alpha", "no noise"),
        ("stage: sft\ntemplate: qwen3", "template", "data.chat_template"),
        ("stage: sft\nval_size: 100", "val_size", "a number of rows"),
        ("stage: sft\nlr_scheduler_type: polynomial", "lr_scheduler_type", "no such schedule"),
        ("base_model: m\nsequence_len: 8\nmicro_batchsize: 2", "micro_batchsize",
         "did you mean `micro_batch_size`?"),
        ("base_model: m\nrl: kto", "rl", "dpo and orpo"),
        ("base_model: m\nsequence_len: 8\nzzqx: 2", "zzqx", ""),
        ("base_model: m\ndatasets: [{path: x, train_on_eos: all}]", "datasets", "train_on_eos"),
        ("base_model: m\ndatasets: [{path: x, roles_to_train: [system]}]", "datasets", "roles"),
        ("base_model: m\ndatasets: [{path: x, roles: {user: [me]}}]", "datasets", "roles"),
        ("base_model: m\nrl: dpo\ndatasets: [{path: x, type: chatml.intel}]", "datasets",
         "chatml.intel"),
        ("base_model: m\nsequence_len: 8\noptimizer: lion", "optimizer", "optimizers are"),
        ("base_model: m\nlora_r: 8\nadapter: llama-adapter", "lora_r", "not in effect"),
    ],
)  # fmt: skip
def test_a_mistake_or_a_setting_without_counterpart(
    text: str, name: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "file.yaml").write_text(f"{text}\ndataset: x\n" if "stage" in text else text)
    found = read(tmp_path / "file.yaml")[1]
    answers = [one.reason for one in found.leftovers if one.at.name == name]
    answers += [one.hint for one in found.unknown if one.name == name]
    assert any(expected in answer for answer in answers), (found.leftovers, found.unknown)


def test_a_data_set_that_nothing_describes(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("stage: sft\ndataset: mine\nfinetuning_type: full\n")
    _, found = read(tmp_path / "file.yaml")
    (reason,) = (one.reason for one in found.leftovers if "dataset_info" in one.reason)
    assert "says what mine is" in reason


def test_what_is_not_read_of_a_data_set_is_reported(tmp_path: Path) -> None:
    columns = {"messages": "m", "system": "s", "tools": "t"}
    info = {"file_name": "x", "formatting": "sharegpt", "columns": columns, "num_samples": 9}
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"x": info, "y": info}))
    text = f"stage: sft\ndataset: [x, y]\ndataset_dir: {tmp_path}/data\n"
    (tmp_path / "file.yaml").write_text(text)
    _, found = read(tmp_path / "file.yaml")
    reasons = [one.reason for one in found.leftovers if one.at.name == "dataset"]
    assert len(reasons) == 2
    assert all(word in reasons[0] for word in ("column s ", "column t ", "num_samples 9"))


def test_a_file_that_names_a_missing_deepspeed_config(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("stage: sft\ndataset: x\ndeepspeed: none.json\n")
    with pytest.raises(RecipeError, match=r"none\.json"):
        read(tmp_path / "file.yaml")
