"""`dmt init --from`: published configurations of other tools become recipes that plan."""

import re
from pathlib import Path

import pytest

from tests.dmt import Dmt
from tests.processes import ROOT
from toolkit.intake.load import load_recipe
from toolkit.plan.planner import plan_recipe

PUBLISHED = ROOT / "tests/foreign/published"
MODELS = {
    "axolotl": "llama-3.1-8b",
    "llama-factory": "llama-3.1-8b",
    "trainer": "llama-3.1-8b",
    "accelerate": "llama-3.1-8b",
}
"""Shapes of the models of tools whose files name one on the hub; the other tools state it."""
CLUSTER = "16x8xh100-80gb"
ALONE = ("gpt_345m", "gpt_345m_tp2_pp2")
"""Batches that are too small for the cluster."""
FILES = sorted(
    path
    for path in PUBLISHED.glob("*/*.*")
    if path.suffix in (".yaml", ".sh", ".json") and path.stem not in ALONE
)
LEFT_OPEN = "REPLACE-ME"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_published_file_becomes_a_recipe(path: Path, tmp_path: Path, dmt: Dmt) -> None:
    """It plans; values have origins, and what is not carried a reason, here and there."""
    model = MODELS.get(path.stem, MODELS.get(path.parent.name))
    out = tmp_path / "recipe.yaml"
    words = ["init", *([model] if model else []), "--from", path, "--cluster", CLUSTER]
    printed = dmt(*words, "--out", out)
    text = out.read_text()
    plan_recipe(load_recipe(out), explained=False)
    assert re.search(rf"# {re.escape(str(path))}(:\d+)? ", text)
    said = [line for line in text.splitlines() if line.startswith("#   ")]
    assert all(re.search(r" \(.+\): .", line) for line in said)
    assert not said or f"CHANGES WHAT IS LEARNED, or is for you to state ({len(said)})" in text
    assert all(line.removeprefix("# ") in printed.err for line in said)
    if LEFT_OPEN in text:
        assert "REPLACE-ME.jsonl, which stands for" in dmt("check", out, code=2).err


ARGUMENTS = """{
  "per_device_train_batch_size": 4,
  "gradient_accumulation_steps": 2,
  "learning_rate": 2e-05,
  "warmup_ratio": 0.03,
  "bf16": true,
  "push_to_hub": true
}"""
DEEPSPEED = """{
  "zero_optimization": {"stage": 3},
  "train_micro_batch_size_per_gpu": "auto",
  "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}
}"""


def test_two_files_and_the_tools_defaults(tmp_path: Path, dmt: Dmt) -> None:
    """The batch is that of the ranks; what the Trainer does by itself is stated."""
    arguments, config = tmp_path / "args.json", tmp_path / "ds.json"
    arguments.write_text(ARGUMENTS)
    config.write_text(DEEPSPEED.replace("0.001", '"auto"'))
    words = ("init", "llama-3.1-8b", "--from", arguments, "--from", config)
    printed = dmt(*words, "--cluster", "1x8xh100-80gb")
    (tmp_path / "recipe.yaml").write_text(printed.out)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe.training.global_batch_size == 4 * 2 * 8
    assert recipe.training.epochs == 3 and recipe.schedule.name == "linear"
    assert recipe.schedule.warmup_ratio == 0.03
    assert recipe.optimizer.betas == (0.9, 0.999)
    assert recipe.parallel.zero.stage == 3
    assert "# the Trainer's default" in printed.out
    assert f"stage: 3                             # {config}:2 zero_optimization.stage" in (
        printed.out
    )
    assert "# ignored (1): push_to_hub" in printed.out
    assert "dmt: ignored (1): push_to_hub" in printed.err


def test_megatron_lms_script_describes_a_model(tmp_path: Path, dmt: Dmt) -> None:
    """A shape in megatron-core's terms becomes a config."""
    script = tmp_path / "train.sh"
    script.write_text(
        "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
        "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 "
        "--global-batch-size 16 --train-iters 50 --lr 1e-4 --fp16 --data-path $DATA "
        "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
        "--ffn-hidden-size 128 --untie-embeddings-and-output-weights --split 9,1,0\n"
    )
    printed = dmt("init", "--from", script, "--cluster", "1x8xh100-80gb")
    (tmp_path / "recipe.yaml").write_text(printed.out)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe.model.config is not None and recipe.model.config["model_type"] == "llama"
    assert recipe.model.config["num_hidden_layers"] == 2
    assert (recipe.optimizer.betas, recipe.schedule.name) == ((0.9, 0.999), "linear")
    assert "only the shell knows $DATA" in printed.err
    assert recipe.data.validation_fraction > 0 and "--split" not in printed.err


TOKEN = "hf_abcdefghijklmnopqrstuvwxyzABCDEF12"
SECRETS = f"""base_model: meta-llama/Llama-3.1-8B
datasets:
  - path: https://user:hunter2secret@example.org/data.jsonl
    type: chat_template
  - token: hunter2secret
    path: b.jsonl
sequence_len: 2048
micro_batch_size: 2
num_epochs: 1
learning_rate: 1e-5
mlflow_tracking_uri: https://user:hunter2secret@mlflow.example.org
mlflow_experiment_name: e
wandb_project: {TOKEN}
hub_token: {TOKEN}
resume_from_checkpoint: s3://AKIAABCDEFGHIJKLMNOP:hunter2secret@bucket/x
"""


BLENDS = {"0.3 /a 0.7 /b": [0.3, 0.7], "/a /b": [1.0, 1.0]}


@pytest.mark.parametrize("words", BLENDS)
def test_a_blend_is_carried(words: str, tmp_path: Path, dmt: Dmt) -> None:
    """With its weights, or equal ones; validation has none."""
    script = tmp_path / "train.sh"
    script.write_text(
        "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
        "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 "
        "--global-batch-size 16 --train-iters 50 --lr 1e-4 --ffn-hidden-size 128 "
        f"--train-data-path {words} --valid-data-path {words}\n"
    )
    printed = dmt("init", "--from", script, "--cluster", "1x8xh100-80gb")
    (tmp_path / "recipe.yaml").write_text(printed.out)
    data = load_recipe(tmp_path / "recipe.yaml").data
    assert isinstance(data.train, tuple) and isinstance(data.validation, tuple)
    assert [one.weight for one in data.train] == BLENDS[words]
    assert [one.weight for one in data.validation] == [None, None]
    assert ("--valid-data-path" in printed.err) == ("0.3" in words)


def test_no_credential_is_written(tmp_path: Path, dmt: Dmt) -> None:
    """They are not carried, and named without a value."""
    given, out = tmp_path / "sec.yaml", tmp_path / "recipe.yaml"
    given.write_text(SECRETS)
    words = ("init", "llama-3.1-8b", "--from", given, "--cluster", "1x8xh100-80gb")
    printed = dmt(*words, "--out", out)
    for text in (out.read_text(), printed.out, printed.err):
        assert "hunter2secret" not in text and TOKEN not in text and "***" not in text
    assert f"#   mlflow_tracking_uri ({given}:11): it has a cred" in out.read_text()
    assert LEFT_OPEN in out.read_text()


def test_yaml_as_pyyaml_reads_it(tmp_path: Path, dmt: Dmt) -> None:
    """A map's own keys win over merged ones, and the first of several maps over the others."""
    given = tmp_path / "axolotl.yaml"
    given.write_text("""
one: &one {seed: 1, weight_decay: 0.1}
two: &two {seed: 2, adam_beta2: 0.95, weight_decay: 0.2}
base_model: meta-llama/Llama-3.1-8B
sequence_len: 2048
micro_batch_size: 2
learning_rate: 0.0003
seed: 7
<<: [*one, *two]
bf16: on
""")
    printed = dmt("init", "llama-3.1-8b", "--from", given, "--cluster", "1x8xh100-80gb")
    (tmp_path / "recipe.yaml").write_text(printed.out)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    optimizer = recipe.optimizer
    assert (recipe.training.seed, optimizer.weight_decay, optimizer.betas[1]) == (7, 0.1, 0.95)
    assert recipe.training.precision == "bf16" and f"{given}:2 weight_decay" in printed.out


def test_a_name_without_a_row(tmp_path: Path, dmt: Dmt) -> None:
    """Where a table does not have every name of its tool, it may be one of the tool's."""
    given = tmp_path / "axolotl.yaml"
    given.write_text(SECRETS.split("mlflow")[0] + "lora_rr: 8\nzzqx: 1\n")
    printed = dmt("init", "--from", given, "--cluster", "1x8xh100-80gb").out
    table = "not in DMT's table of Axolotl's settings: it may change training"
    assert f"zzqx ({given}:12): {table}\n" in printed
    assert f"lora_rr ({given}:11): {table}; did you mean `lora_r`?" in printed


LF = "stage: sft\ndataset: x\ncutoff_len: 512\n"
AXOLOTL = "base_model: a/b\nmicro_batch_size: 1\n"
SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --train-iters 5 "
    "--max-position-embeddings 128 --micro-batch-size 1 --lr 1e-4 --ffn-hidden-size 128 "
    "--attention-dropout 0 --hidden-dropout 0 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope "
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{LF.replace('sft', 'kto')}", "stage"),
        (f"{LF.replace('sft', 'rm')}", "stage"),
        (f"{LF}do_predict: true\n", "do_predict"),
        (f"{LF}quantization_bit: 4\n", "quantization_bit"),
        (f"{LF}image_max_pixels: 262144\n", "image_max_pixels"),
        (f"{LF}lr_scheduler_type: polynomial\n", "lr_scheduler_type"),
        (f"{AXOLOTL}sequence_len: 5k\n", "sequence_len"),
        (f"{AXOLOTL}adapter: qlora\n", "adapter"),
        (f"{AXOLOTL}rl: kto\n", "rl"),
        (f"{AXOLOTL}processor_type: AutoProcessor\n", "processor_type"),
        (f"{AXOLOTL}weight_decay: -1\n", "weight_decay"),
        (f"torchrun x.py {SHAPE} --num-experts 4 --moe-router-score-function sigmoid",
         "--moe-router-score-function"),
    ],
)  # fmt: skip
def test_another_run_or_a_value_that_is_not_understood_is_refused(
    text: str, found: str, tmp_path: Path, dmt: Dmt
) -> None:
    """Neither the tool's default nor DMT's is trained instead."""
    given = tmp_path / ("train.sh" if "torchrun" in text else "file.yaml")
    given.write_text(text)
    model = [] if "torchrun" in text else ["llama-3.1-8b"]
    words = ("init", *model, "--from", given, "--cluster", "1x8xh100-80gb")
    assert found in dmt(*words, code=2).err


def test_numbers_of_yaml_1_1_and_the_models_tokenizer(tmp_path: Path, dmt: Dmt) -> None:
    given, out = tmp_path / "axolotl.yaml", tmp_path / "recipe.yaml"
    given.write_text(f"{AXOLOTL}sequence_len: 4_096\nlearning_rate: 2e-5\n")
    dmt("init", "llama-3.1-8b", "--from", given, "--cluster", "1x8xh100-80gb", "--out", out)
    recipe = load_recipe(out)
    assert recipe.training.sequence_length == 4096
    assert "Llama-3.1" in recipe.data.tokenizer
    assert "--task" not in out.read_text()


def test_arrays_of_a_script_and_an_unknown_tokenizer(tmp_path: Path, dmt: Dmt) -> None:
    given, out = tmp_path / "train.sh", tmp_path / "recipe.yaml"
    given.write_text(
        'LAYERS=${LAYERS:-3}\nMORE="--bf16 --weight-decay 0.3"\nDATA=(\n'
        '  "--vocab-size 128256"\n  "--split \'99,1,0\'"\n'
        '  "--tokenizer-type NullTokenizer"\n)\n'
        f"torchrun x.py {SHAPE.replace('layers 2', 'layers $LAYERS')} ${{DATA[@]}} $MORE\n"
    )
    dmt("init", "--from", given, "--cluster", "1x1xh100-80gb", "--out", out)
    recipe = load_recipe(out)
    config = recipe.model.config or {}
    assert (config["vocab_size"], config["num_hidden_layers"]) == (128256, 3)
    assert recipe.data.validation_fraction == pytest.approx(0.01)
    assert (recipe.training.precision, recipe.optimizer.weight_decay) == ("bf16", 0.3)
    assert recipe.data.tokenizer == LEFT_OPEN
    assert "a tokenizer that dmt init did not know" in dmt("check", out, code=2).err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--from", "train.py", "--cluster", "1x8xh100-80gb"), "docs/coming-from/"),
        (("--from", "args.json", "--cluster", "1x8xh100-80gb"), "the files name no model"),
        (("llama-3.1-8b", "--from", "args.json"), "NODESxGPUSxNAME"),
        (("llama-3.1-8b",), "--cluster: missing"),
        (("--cluster", "1x8xh100-80gb"), "MODEL: missing"),
        (("llama-3.1-8b", "--from", "args.json", "--from", "ds.json", "--cluster",
          "1x8xh100-80gb"), "what learning_rate at args.json:4 says: 2e-05"),
        (("--from", "notes.txt", "--cluster", "1x8xh100-80gb"), "without `--flags`"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_one_clear_error(
    words: tuple[str, ...],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dmt: Dmt,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("args.json").write_text(ARGUMENTS)
    Path("ds.json").write_text(DEEPSPEED)
    Path("notes.txt").write_text("nothing")
    Path("train.py").write_text("import torch")
    assert error in " ".join(dmt("init", *words, code=2).err.split())
