"""`dmt init`: every recipe that it writes can be checked, planned and read by a person."""

import json
import math
import os
import re
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import get_args

import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.dmt import Dmt
from toolkit.cli.main import main
from toolkit.data.tokenizers import byte_tokenizer
from toolkit.intake.checks import steps_with
from toolkit.intake.load import load_recipe
from toolkit.models.families import model_spec
from toolkit.models.hub import download_file
from toolkit.plan.estimate import estimate_plan
from toolkit.plan.hardware.cluster_file import find_cluster
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.dump import dump
from toolkit.recipe.places import shipped_recipes
from toolkit.recipe.schema import ParallelSection, Recipe
from toolkit.starter.data import count_samples
from toolkit.starter.draft import Task, draft, shipped_sizes
from toolkit.starter.text import stated
from toolkit.text.units import GIB, seconds

SIZES = {
    next(iter(tasks.values())).parent.name: size for size, tasks in shipped_sizes().items()
}.values()
"""One shipped size of each family; tests/test_recipes.py reads and plans them all."""
SHIPPED = [(size, task) for size in SIZES for task in shipped_sizes()[size]]
WITH_VISION = {"gemma-3-4b", "gemma-3-27b", "llama-4-scout"}
"""Sizes whose published weights are not of their text model alone."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000,
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05, "torch_dtype": "bfloat16", "transformers_version": "4.31.0",
    "use_cache": True, "tie_word_embeddings": False,
}  # fmt: skip
"""A model of 1.1 billion parameters that no recipe is shipped for, as its hub page has it."""


CPU = ("--cluster", "1x2xcpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "TinyLlama"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def written(tmp_path: Path, dmt: Dmt, *arguments: str) -> tuple[str, Recipe]:
    """What `dmt init` writes, saved, checked and planned as a user would."""
    printed = dmt("init", *arguments)
    file = tmp_path / "recipe.yaml"
    file.write_text(printed.out)
    recipe = load_recipe(file)
    tokenizer = Path(recipe.data.tokenizer)
    lacks = tokenizer.is_dir() and not [*tokenizer.glob("tokenizer*")]
    checked = dmt("check", file, code=2 * lacks)
    assert ("holds no tokenizer.json" in " ".join(checked.err.split())) == lacks
    dmt("plan", file, code=2 * ("DOES NOT FIT" in printed.out))
    return printed.out, recipe


@pytest.mark.parametrize(("size", "task"), SHIPPED)
def test_every_shipped_size(size: str, task: str, tmp_path: Path, dmt: Dmt) -> None:
    """The shipped recipe's own numbers on another cluster, and no layout."""
    text, recipe = written(tmp_path, dmt, size, "--task", task, "--cluster", "8x8xh100-80gb")
    shipped = load_recipe(shipped_sizes()[size][task])
    assert recipe.parallel == ParallelSection()
    assert recipe.cluster.world_size == 64
    assert recipe.optimizer == shipped.optimizer
    assert (recipe.adapter, recipe.dpo, recipe.data) == (
        shipped.adapter,
        shipped.dpo,
        shipped.data,
    )
    assert recipe.model == shipped.model
    assert recipe.training.sequence_length == shipped.training.sequence_length
    assert recipe.training.tokens == shipped.training.tokens
    assert recipe.training.global_batch_size == max(64, shipped.training.global_batch_size)
    assert len(text.splitlines()) <= 75
    assert max(map(len, text.splitlines())) <= 160


@cache
def _shipped(size: str) -> Recipe:
    return load_recipe(next(iter(shipped_sizes()[size].values())))


OTHERS = [
    (size, task)
    for size in SIZES
    for task in get_args(Task)
    if task not in shipped_sizes()[size] and not (size in WITH_VISION and task != "pretrain")
]


@pytest.mark.parametrize(("size", "task"), OTHERS)
def test_every_shipped_shape_has_every_task(size: str, task: Task, tmp_path: Path) -> None:
    """The shape and tokenizer of a shipped recipe, the numbers of the task's shared part."""
    cluster = find_cluster("8x8xh100-80gb")
    drafted = draft(size, cluster, task)
    file = tmp_path / "recipe.yaml"
    file.write_text(dump(stated(drafted), flow=False))
    recipe = load_recipe(file)  # no rule is broken
    shipped = _shipped(size)
    assert recipe.name == f"{size}-{task}" and recipe.data.tokenizer == shipped.data.tokenizer
    assert (recipe.model.hub, recipe.model.config) == (shipped.model.hub, shipped.model.config)
    objective = "sft" if task == "lora" else task
    assert recipe.training.objective == objective
    experts = model_spec(recipe.model.config or {}).parameters.experts
    if recipe.adapter is not None:
        assert recipe.adapter.targets == ("attention" if experts else "all-linear")
    assert (recipe.adapter is not None) == (task == "lora")
    trained_on = task != "pretrain" and recipe.model.hub is not None
    assert recipe.model.init == ("pretrained" if trained_on else "random")


def test_a_hub_id_of_a_shipped_shape() -> None:
    """Its shape is known without the hub."""
    cluster = find_cluster("8x8xh100-80gb")
    assert draft("Qwen/Qwen3-32B", cluster, "sft") == draft("qwen3-32b", cluster, "sft")


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error after a limit, however long the hub's own client tries."""
    answer = threading.Event()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: answer.wait())
    with pytest.raises(TimeoutError):
        download_file("some/model", "config.json", None, limit_s=0.01)
    answer.set()


def test_shipped_recipes_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmt: Dmt
) -> None:
    """From anywhere; a file of the same name is the user's."""
    monkeypatch.chdir(tmp_path)
    header, *lines = dmt("recipes").out.split("\n\n")[1].splitlines()
    listed = [
        f"{size}-{task}"
        for size, _, *cells in (re.split(r"  +", line) for line in lines)
        for task, cell in zip(header.split()[2:], cells, strict=True)
        if cell != "-"
    ]
    assert {*listed} < {*shipped_recipes()} and len(listed) > 50
    assert (lines[0].split()[:2], lines[-1].split()[0]) == (
        ["gpt2-124m", "124M"],
        "deepseek-v3",
    )
    dmt("check", listed[0], listed[-1], "llama-sft", "qwen3-0.6b-lora")
    Path("mine.yaml").write_text(
        "extends: [recipes:base/sft.yml, recipes:llama/llama-3.1-8b.yml]\nname: mine\n"
    )
    mine = load_recipe(Path("mine.yaml"))
    assert mine.model == load_recipe(Path("llama-3.1-8b-sft")).model
    Path("gpt2-124m-pretrain").write_text("name: mine\n")
    dmt("check", "gpt2-124m-pretrain", code=2)
    printed = dmt("plan", "llama-3.1-8b-pretrian", code=2).err
    assert "did you mean the shipped recipe `llama-3.1-8b-pretrain`?" in printed


def test_a_file_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmt: Dmt
) -> None:
    """The same recipe as on standard output; a recipe that is there is never overwritten."""
    monkeypatch.chdir(tmp_path)
    arguments = ["init", "gpt2-124m", "--cluster", "2xcpu"]
    printed = dmt(*arguments).out
    out, err = dmt(*arguments, "--out", "mine.yaml")
    assert out == "" and err == "wrote mine.yaml; next: dmt check mine.yaml\n"
    text = Path("mine.yaml").read_text()
    assert text == printed
    dmt("check", "mine.yaml")
    Path("mine.yaml").write_text("edited")
    for file, said in (("mine.yaml", "File exists"), ("no/where.yaml", "No such file")):
        err = dmt(*arguments, "--out", file, code=2).err
        assert f"dmt: {file}: {said}" in err and "Traceback" not in err
    assert Path("mine.yaml").read_text() == "edited"


def test_comments_are_the_plans_numbers(tmp_path: Path, dmt: Dmt) -> None:
    text, recipe = written(tmp_path, dmt, "llama-3.1-8b", "--cluster", "4x8xh100-80gb")
    plan = plan_recipe(recipe)
    found = estimate_plan(recipe, plan)
    step_s = found.time.total_s
    days = 1_788_140 * step_s / 86400
    assert "# 8,030,261,248 parameters" in text
    assert "tokens: 15000000000000 " in text and "# 15T; 1,788,140 steps" in text
    assert "# samples; 8.39M tokens a step" in text
    memory = f"{found.memory.total / GIB:.1f} of 79.1 GiB per GPU"
    assert f"# Planned: {memory}; {seconds(step_s)} a step, " in text
    assert f"MFU {found.time.utilization():.0%}" in text
    assert f"# 1,788,140 steps take {days:,.1f} days: {days * 24 * 32:,.1f} GPU hours." in text
    for key, value in (("tensor", plan.layout.tp), ("recompute", plan.layout.recompute)):
        assert f"  {key}: auto".ljust(34) + f"# now {value}\n" in text


def test_a_folder_gets_usual_numbers(folder: Path, tmp_path: Path, dmt: Dmt) -> None:
    """GPT-3's batch and learning rate for its size, 20 tokens per parameter."""
    text, recipe = written(tmp_path, dmt, str(folder), "--cluster", "8xa100-80gb")
    assert recipe.name == "tinyllama-pretrain"
    assert recipe.model.hub == str(folder) and recipe.model.init == "random"
    assert recipe.model.config is not None
    assert recipe.model.config["num_hidden_layers"] == 22
    assert "torch_dtype" not in text and "architectures" not in text
    training = recipe.training
    assert (training.sequence_length, training.global_batch_size) == (2048, 128)
    assert recipe.optimizer.learning_rate == 2.5e-4
    assert training.steps is not None
    tokens = training.steps * 128 * 2048
    assert tokens == pytest.approx(20 * 1_100_048_384, rel=1e-4)
    assert recipe.data.tokenizer == str(folder)


@pytest.mark.parametrize(
    ("task", "objective", "kind", "learning_rate"),
    [
        ("sft", "sft", "chat", 2e-5),
        ("lora", "sft", "chat", 2e-4),
        ("dpo", "dpo", "preference", 5e-7),
    ],
)
def test_post_training_of_a_folder(
    task: str, objective: str, kind: str, learning_rate: float, folder: Path,
    tmp_path: Path, dmt: Dmt
) -> None:  # fmt: skip
    """The numbers of `recipes/base/`, with the tokenizer's own template if it has one."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    save_file({"x": np.zeros(1)}, folder / "model.safetensors")
    arguments = [str(folder), "--cluster", "8xa100-80gb", "--task", task]
    _, recipe = written(tmp_path, dmt, *arguments)
    assert (recipe.name, recipe.model.init) == (f"tinyllama-{task}", "pretrained")
    assert (recipe.training.objective, recipe.data.train.kind) == (objective, kind)
    assert recipe.optimizer.learning_rate == learning_rate
    assert recipe.data.tokenizer == str(folder)
    assert recipe.data.chat_template == "chatml"
    assert (recipe.adapter is not None) == (task == "lora")
    assert (recipe.dpo is not None) == (task == "dpo")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    _, recipe = written(tmp_path, dmt, *arguments)
    assert recipe.data.chat_template is None


@pytest.mark.parametrize(
    ("cluster", "precision", "batch"),
    [("3x8xv100-32gb", "fp16", 528), ("2xcpu", "fp32", 512), ("8xh100-80gb", "bf16", 512)],
)
def test_what_the_cluster_decides(
    cluster: str, precision: str, batch: int, tmp_path: Path, dmt: Dmt
) -> None:
    """Precision that the device has, and a batch that its ranks can share."""
    text, recipe = written(tmp_path, dmt, "gpt2-124m", "--cluster", cluster)
    assert (recipe.training.precision, recipe.training.global_batch_size) == (precision, batch)
    assert ("nominal CPU" in text) == (cluster == "2xcpu")


def test_a_cluster_file_with_a_price(tmp_path: Path, dmt: Dmt) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(
        "nodes: 2\ngpus_per_node: 8\ngpu: {like: h100-80gb, name: ours, memory_gib: 96}\n"
        "price_per_gpu_hour: 2\n"
    )
    text, recipe = written(tmp_path, dmt, "llama-3.2-1b", "--cluster", str(file))
    assert recipe.cluster.gpu == "h100-80gb"
    assert " of 96 GiB per GPU" in text
    assert f"add `--cluster {file}`" in text
    steps = recipe.training.steps or 0
    assert steps or recipe.training.tokens
    plan = plan_recipe(recipe, find_cluster(str(file)))
    assert plan.step_time_s is not None
    assert " at the cluster's price" in text


@pytest.mark.parametrize(
    ("size", "cluster", "said"),
    [
        ("llama-3.1-405b", "1xv100-32gb", "# Planned: DOES NOT FIT (see `dmt plan`): "),
        ("llama-3.1-8b", "1xh100-80gb", "optimizer on cpu\n"),
    ],
)
def test_what_a_small_cluster_needs(
    size: str, cluster: str, said: str, tmp_path: Path, dmt: Dmt
) -> None:
    assert said in written(tmp_path, dmt, size, "--cluster", cluster)[0]


ROWS = {
    "pretrain": {"text": "one and one is two, " * 40},
    "sft": {
        "messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    },
    "dpo": {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
}
ROWS["lora"] = ROWS["sft"]


@pytest.mark.parametrize(
    ("model", "task", "rows"),
    [
        *(("llama-bytes", task, 1000) for task in get_args(Task)),
        ("qwen3-0.6b", "lora", 1000),
        ("qwen3-0.6b", "pretrain", 40),
    ],
)
def test_data_decides_batch_length_and_warm_up(
    model: str,
    task: Task,
    rows: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    dmt: Dmt,
) -> None:
    """What is written passes `dmt check`, or the data is too little."""
    data, file = tmp_path / "data.jsonl", tmp_path / "recipe.yaml"
    data.write_text(f"{json.dumps(ROWS[task])}\n" * rows)
    words = [model, "--cluster=1x2xcpu", f"--task={task}", f"--data={data}", f"--out={file}"]
    code = main(["init", *words])
    err = capsys.readouterr().err
    if code == 2:
        assert rows == 40 and "processes need one each" in err, err
        return
    dmt("check", file)
    recipe = load_recipe(file)
    assert recipe.training.epochs == 1 and recipe.training.global_batch_size % 2 == 0
    assert recipe.data.train.places == (str(data),)  # type: ignore[union-attr]
    if model == "llama-bytes":  # whose tokenizer is here
        samples = count_samples(recipe, data)
        assert samples is not None and recipe.training.global_batch_size <= samples
        steps = steps_with(recipe, samples)
        shipped, tenth = shipped_warmup(model, task), math.ceil(0.1 * steps)
        assert recipe.schedule.warmup(steps) == (shipped if 0 < shipped < tenth else tenth)


def shipped_warmup(model: str, task: Task) -> int:
    return draft(model, find_cluster("1x2xcpu"), task).schedule.warmup_steps


def test_a_few_rows_make_one_sample(tmp_path: Path, dmt: Dmt) -> None:
    """Packed rows are padded: of text this short, a sample is not whole."""
    data, file = tmp_path / "data.jsonl", tmp_path / "recipe.yaml"
    data.write_text(f"{json.dumps(ROWS['lora'])}\n" * 60)
    words = ["init", "qwen3-0.6b", "--task=lora", f"--data={data}", f"--out={file}"]
    dmt(*words, "--cluster=1x1xcpu")
    assert load_recipe(file).training.global_batch_size == 1
    told = dmt(*words, "--cluster=1x2xcpu", code=2).err
    assert "makes 1 sample of 2048 tokens, and 2 processes need one each" in told


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["llama-3.1-8", "--cluster", "8xh100-80gb"], "did you mean `llama-3.1-8b`?"),
        (["no/such-model", "--cluster", "8xh100-80gb"], "not on the hub or in its cache"),
        (["no/such-model", "--cluster", "8xh100-80gb"], "take one of `dmt recipes`"),
        (["./no-folder", "--cluster", "8xh100-80gb"], "there is no folder ./no-folder"),
        (
            ["gemma-3-4b", "--cluster", "8xh100-80gb", "--task", "lora"],
            "name a folder with them: dmt init FOLDER --task lora",
        ),
        (
            ["gpt2-124m", "--cluster", "8xh100-80gb", "--task", "chat"],
            "'chat' is not one of 'pretrain',",
        ),
        (["gpt2-124m", "--cluster", "8xh900"], "cluster.gpu: found 'h900'"),
        (["gpt2-124m", "--cluster", "none.yaml"], "cannot read none.yaml"),
        # Bytes are right for a new model only.
        (["TinyLlama", *CPU, "--task", "sft"], "holds no tokenizer"),
        (["short", *CPU], "training.sequence_length"),
        (["nothing", *CPU], "config.json"),
        (["llama-bytes", *CPU, "--task", "sft", "--data", "pairs.jsonl"],
         "--task dpo, or name a file with chat data"),
        # Not taken for a text of one document.
        (["llama-bytes", *CPU, "--data", "empty.jsonl"], "empty.jsonl has no rows that can be"),
        (["llama-bytes", *CPU, "--data", "broken.jsonl"], "broken.jsonl has no rows that can"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("folder")
def test_mistakes_are_one_error(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dmt: Dmt,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "short/config.json": json.dumps(CONFIG | {"max_position_embeddings": 1}),
        "pairs.jsonl": json.dumps(ROWS["dpo"]), "empty.jsonl": "",
        "broken.jsonl": '{"text": ', "nothing/x": "",
    }.items():  # fmt: skip
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    printed = dmt("init", *arguments, code=2)
    assert expected in printed.err
    assert printed.out == "" and "Traceback" not in printed.err


def test_columns_of_other_names(tmp_path: Path, dmt: Dmt) -> None:
    """The mapping of columns that is proposed can be trained on."""
    data, file = tmp_path / "rows.jsonl", tmp_path / "recipe.yaml"
    data.write_text(f"{json.dumps({'question': '1+1?', 'answer': '2'})}\n" * 8)
    words = ["init", "llama-bytes", "--cluster", "1xcpu", "--task", "sft"]
    told = dmt(*words, "--data", data, code=2).err
    (proposed,) = re.findall(r"`data.train: ({.*})`", told)
    dmt(*words, "--out", file)
    dmt("check", file, "--set", f"data.train={proposed}", "--set", "data.train.split=train")
    assert "instruction: question, output: answer" in proposed


def test_a_text_is_one_document(tmp_path: Path, dmt: Dmt) -> None:
    """Nothing of it can be held out. A folder's tokenizer may still be missing."""
    text, file = tmp_path / "all.txt", tmp_path / "recipe.yaml"
    text.write_text("to be or not to be\n" * 500)
    words = ["--cluster", "1x2xcpu", "--data", text]
    dmt("init", "llama-bytes", *words, "--out", file)
    dmt("check", file)
    model = {"model_type": "llama", "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(model))
    assert "TO DO: it holds no tokenizer" in dmt("init", tmp_path, *words).out


def test_a_hub_id_from_the_local_cache(tmp_path: Path) -> None:
    """Offline, a model that was downloaded before is known."""
    repository = tmp_path / "hub" / "models--some--llama"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    command = [sys.executable, "-m", "toolkit.cli.main", "init", "some/llama"]
    done = subprocess.run(
        [*command, "--cluster", "8xh100-80gb"],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "  hub: some/llama\n" in done.stdout
    assert "  tokenizer: some/llama\n" in done.stdout
    assert "name: llama-pretrain\n" in done.stdout


@pytest.mark.parametrize("name", ["My Model (v2)", "ünï", "..."])
def test_any_folder_name(name: str, tmp_path: Path, dmt: Dmt) -> None:
    made = tmp_path / name
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    _, recipe = written(tmp_path, dmt, str(made), "--cluster", "2xcpu")
    assert recipe.name.endswith("-pretrain")
