"""What files of other tools state, by value; another run and a misunderstood value are refused.

The files have the shape of the tools' own examples: arrays, anchors, registries of data sets,
numbers with underscores, blocks of DeepSpeed and FSDP.
"""

import dataclasses
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from ruamel.yaml import YAML
from transformers import TrainingArguments

from tests.foreign.conftest import FILES, Planned
from toolkit.errors import DmtError, RecipeError
from toolkit.foreign.files import SECTIONS
from toolkit.foreign.megatron import config_of
from toolkit.foreign.shell import read_flags
from toolkit.foreign.statements import complete, read_together
from toolkit.foreign.tables import tool, tools

EXPECTED = YAML(typ="safe").load(FILES / "expected.yaml")


def stated(paths: list[Path]) -> tuple[dict[str, Any], set[str]]:
    """Our settings, with those of the model, and the names of what changes training."""
    found = read_together(paths, "--from")
    config, problems = config_of(found)
    if problems:
        raise RecipeError(problems)
    complete(found, 8)
    values = {key: one.value for key, one in found.values.items()}
    values |= {f"model.config.{key}": value for key, value in config.items()}
    return values, {one.at.name for one in found.left if one.changes}


@pytest.mark.parametrize("files", EXPECTED)
def test_values(files: str) -> None:
    expected = dict(EXPECTED[files])
    paths = [FILES / name for name in files.split()]
    if refused := expected.pop("refused", ()):
        with pytest.raises(RecipeError) as caught:
            stated(paths)
        text = str(caught.value)
        assert all(name in text for name in refused) and f"{paths[0]}:" in text
        return
    left = set(expected.pop("changes", ()))
    values, changes = stated(paths)
    assert {key: values.get(key) for key in expected} == expected
    assert left <= changes


LF, AXOLOTL = (
    "stage: sft\ndataset: x\ncutoff_len: 512\n",
    "base_model: a/b\nmicro_batch_size: 1\n",
)
TRL = "report_to: none\nlearning_rate: 1e-5\n"
SHAPE = (
    "torchrun x.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--micro-batch-size 1 --lr 1e-4 --train-iters 50 --padded-vocab-size 512 --swiglu "
    "--max-position-embeddings 128 --ffn-hidden-size 128 --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope "
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((LF + more, more.partition(":")[0]) for more in (
            "stage: rm\n", "do_predict: true\n", "quantization_bit: 4\n", "pref_loss: simpo\n",
            "image_max_pixels: 262144\n", "lr_scheduler_type: poly\n", "finetuning_type: oft\n",
        )),
        *((AXOLOTL + more, more.partition(":")[0]) for more in (
            "sequence_len: 5k\n", "rl: grpo\n", "processor_type: A\n",
            "weight_decay: -1\n",
            "load_in_8bit: true\n", "optimizer: lion\n", "warmup_ratio: a\n",
            "reward_model: true\n", "datasets: [1]\n", "max_steps: [1]\n",
            "val_set_size: a\n", "a: {<<: {x: 1}, <<: {y: 1}}\n",
        )),
        *((TRL + more, more.partition(":")[0]) for more in (
            "load_in_4bit: true\n", "max_steps: '1h'\n", "optim: lion_32bit\n",
            "loss_type: kto\n", "predict_with_generate: true\n", "bf16: maybe\n",
            "use_peft: 1\n",
        )),
        (f"{SHAPE} --num-experts 4 --moe-router-score-function sigmoid", "--moe-router-sco"),
        (SHAPE.replace("128 ", "$SEQ ", 1), "--seq-length"),
        (SHAPE.replace("--padded-vocab-size 512", ""), "--vocab-size"),
        (SHAPE.replace("--swiglu", ""), "--position-embedding-type"),
        (f"{SHAPE} --perform-rl-step", "--perform-rl-step"),
        (f"{SHAPE} --lr-decay-style WSD", "--lr-decay-style"),
        (f"{SHAPE} --lr 'never ends", "quotation"),
        ('{"zero_optimization": {"stage": 7}}', "zero_optimization.stage"),
        ('{"zero_optimization": 3}', "zero_optimization"),
        ("distributed_type: TPU\nnum_processes: 2", "distributed_type"),
        ("num_processes: x\nmixed_precision: no", "num_processes"),
        ("fp16: true\nmax_steps: 3", "the Trainer, LLaMA-Factory, Axolotl alike"),
        ("model: a/b\ntrain_dataset: d\ncutoff_len: 512\ntemplate: qwen", "a format that"),
    ],
)  # fmt: skip
def test_another_run_or_a_value_that_is_not_understood(
    text: str, name: str, tmp_path: Path
) -> None:
    """Neither the tool's default nor DMT's is trained instead."""
    suffix = "sh" if "torchrun" in text else "json" if text.startswith("{") else "yaml"
    lines = {line.partition(":")[0]: line for line in text.splitlines()}
    file = tmp_path / f"file.{suffix}"
    file.write_text("\n".join(lines.values()) if suffix == "yaml" else text)
    with pytest.raises(RecipeError) as caught:
        stated([file])
    assert f"{file}:" in str(caught.value) and name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("stage: dpo\ndataset: x", "dpo.beta", None),  # the recipe's default is the tool's
        ("stage: sft\ndataset: x\nlora_rank: 4", "adapter.alpha", 8),
        ("stage: sft\ndataset: x\nlora_rank: 4\nuse_rslora: true", "adapter.alpha", 16),
        ("stage: sft\ndataset: x\nlora_rank: 4\nuse_rslora: false", "adapter.alpha", 8),
        ("base_model: m\nmicro_batch_size: 2\nbatch_size: 9", "training.global_batch_size", 64),
        ("base_model: m\nrl: ipo\nrl_beta: 0.2", "dpo.loss", "ipo"),
        ("base_model: m\nlr_scheduler: constant\nwarmup_steps: 9",
         "schedule.warmup_steps", None),
        ("base_model: m\nseed: 1\nfp16: true\nbf16: false", "training.precision", "fp16"),
        (f"{TRL}eval_strategy: steps\nlogging_steps: 7", "evaluation.every_steps", 7),
        (f"{TRL}eval_strategy: epoch\neval_steps: 7", "evaluation.every_steps", None),
        (f"{TRL}max_steps: 5\nnum_train_epochs: 2", "training.epochs", None),
        (f"{TRL}max_steps: -1", "training.epochs", 3.0),
        (f"{TRL}max_grad_norm: 0", "optimizer.clip_grad_norm", None),
        (f"{TRL}fsdp: shard_grad_op", "parallel.zero.stage", 2),
        (f"{TRL}fsdp: true\nfsdp_config: {{version: 1, reshard_after_forward: FULL_SHARD}}",
         "parallel.zero.stage", 3),
        (f"{SHAPE} --train-data-path 0.3 /a 0.7 /b", "data.train",
         [{"kind": "megatron", "prefix": "/a", "weight": 0.3},
          {"kind": "megatron", "prefix": "/b", "weight": 0.7}]),
        (f"{SHAPE} --eval-iters 0", "evaluation.every_steps", None),
        (f"{SHAPE} --save-interval 50", "checkpoint.every_steps", 50),
        (f"{SHAPE} --tokenizer-type NullTokenizer", "data.tokenizer", None),
        (f"{SHAPE} --recompute-granularity full --recompute-method block "
         "--recompute-num-layers 1", "parallel.recompute", 1),
    ],
)  # fmt: skip
def test_a_setting(text: str, key: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / ("a.sh" if "torchrun" in text else "a.yaml")
    file.write_text(text)
    assert stated([file])[0].get(key) == value


@pytest.mark.parametrize("name", ["gpt3", "llama3_fp8", "mixtral", "qwen3", "gptoss"])
def test_scripts_are_read_as_bash_reads_them(name: str, tmp_path: Path) -> None:
    """bash itself is asked for the words that it gives to torchrun."""
    script = FILES / f"megatron_lm/{name}.sh"
    words = [str(tmp_path / one) for one in "abcde"]
    shell = f"torchrun() {{ printf '%s\\0' \"$@\"; }}; source {script} {' '.join(words)}"
    ran = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True)
    given = ran.stdout.split("\0")[:-1]
    text = script.read_text()
    for index, word in enumerate(words, 1):
        text = text.replace(f"${index}", word).replace(f"${{{index}:-", f"${{N{index}:-")
    flags, undecided = read_flags(
        f"{''.join(f'N{i}={w}{chr(10)}' for i, w in enumerate(words, 1))}{text}", "x"
    )
    read = [part for one in flags for part in (one.name, *one.values)]
    split = [
        part for word in given for part in (word.split("=", 1) if word[:2] == "--" else [word])
    ]
    assert read == [word for word in split if not word.endswith(".py")] and not undecided


def test_names_of_the_installed_tools() -> None:
    """The tables of tools whose every name DMT claims to know have them."""
    table = tool("trainer")
    unknown = [
        field.name
        for field in dataclasses.fields(TrainingArguments)
        if table.renamed.get(field.name, field.name) not in table.names
        and not table.ignores(field.name)
    ]
    assert unknown == []
    table = tool("accelerate")
    names = {field.name for field in dataclasses.fields(ClusterConfig)}
    assert names <= table.names | SECTIONS.keys()


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, 1e308, 10**400, "", "x", "true", "no", "steps", "auto"),
    *("a\0b", "y" * 5000, [], [[]], [{}], [True, "x"], {}, {"A": 1}, {"stage": {}}, "{"),
)


@pytest.mark.parametrize("key", [one.key for one in tools() if one.key != "megatron_lm"])
def test_any_value_at_any_key(key: str, tiny: Planned, tmp_path: Path) -> None:
    """No setting may stop a run with a traceback."""
    chance, table = random.Random(6), tool(key)
    names = sorted(name for name in table.names if "*" not in name and "." not in name)
    file = tmp_path / "file.json"
    for _ in range(100):
        some = chance.sample(names, min(8, len(names)))
        values = {name: chance.choice(VALUES) for name in some}
        file.write_text(json.dumps(values))
        try:
            stated([file])
            tiny.against(file)
        except DmtError:
            pass
