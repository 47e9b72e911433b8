"""`dmt init --from`: a recipe with the origin of every value, or one clear error."""

import re
from pathlib import Path

import pytest

from tests.dmt import Dmt
from tests.foreign.conftest import FILES
from toolkit.foreign.compare import against
from toolkit.intake.load import load_recipe
from toolkit.plan.planner import plan_recipe

MACHINE = ("--cluster", "1x8xh100-80gb")
LEFT_OPEN = "REPLACE-ME"


@pytest.mark.parametrize(
    ("model", "file"),
    [
        ("llama-3.1-8b", "trainer/arguments.json"),
        ("llama-3.1-8b", "axolotl/lora.yml"),
        ("llama-3.1-8b", "axolotl/dpo.yaml"),
        ("llama-3.1-8b", "llama_factory/full_sft.yaml"),
        (None, "megatron_lm/args.txt"),
        (None, "megatron_lm/llama3_fp8.sh"),
    ],
)
def test_a_file_becomes_a_recipe_that_plans(
    model: str | None, file: str, tmp_path: Path, dmt: Dmt
) -> None:
    """MODEL has its own tokenizer; unknown data and tokenizers are placeholders that `check`
    refuses; what changes training is said first, in the file and on the terminal."""
    path, out = FILES / file, tmp_path / "recipe.yaml"
    words = ["init", *([model] if model else []), "--from", path, *MACHINE, "--out", out]
    printed, text = dmt(*words).err, out.read_text()
    recipe = load_recipe(out)
    assert "not planned" not in text and re.search(rf"# {re.escape(str(path))}:\d+ ", text)
    if model is not None:
        assert recipe.model.hub == recipe.data.tokenizer
        assert recipe.data.tokenizer.startswith("meta-llama/Llama-3.1-8B")
    said = [line for line in text.splitlines() if line.startswith("#   ")]
    assert all(re.search(r" \(.+\): .", line) for line in said)
    assert all(line.removeprefix("# ") in printed for line in said)
    first, last = text.find("CHANGES WHAT IS LEARNED"), text.find("# ignored (")
    assert first < last or last == -1
    if LEFT_OPEN in text:
        assert "which stands for" in dmt("check", out, code=2).err
    if file.endswith("llama3_fp8.sh"):
        assert recipe.data.tokenizer == LEFT_OPEN
    plan = plan_recipe(recipe, explained=False)
    wrong = [row for row in against(path, recipe, plan).settings if not row.agrees]
    assert model is not None or not wrong, wrong


ARGUMENTS = (
    '{\n  "per_device_train_batch_size": 4,\n  "learning_rate": 2e-05,\n  "bf16": true\n}'
)
DEEPSPEED = (
    '{\n  "zero_optimization": {"stage": 3},\n  "optimizer": {"params": {"lr": 0.001}}\n}'
)


@pytest.mark.parametrize(
    ("more", "loss_on"),
    [
        ("", "not stated"),
        ("assistant_only_loss: true", "assistant"),
        ("assistant_only_loss: false", "all"),
        ("assistant_only_loss: false\ncompletion_only_loss: true", "completion"),
    ],
)
def test_which_tokens_of_chats_train(more: str, loss_on: str, tmp_path: Path, dmt: Dmt) -> None:
    """TRL trains on whole conversations by default, a recipe on what the assistant says."""
    file = tmp_path / "sft.yaml"
    file.write_text(f"dataset_name: a/b\nuse_peft: true\nmax_length: 512\n{more}\n")
    said = dmt("init", "llama-3.1-8b", "--from", file, *MACHINE)
    assert ("assistant_only_loss (not stated)" in said.err) == (loss_on == "not stated")
    assert (f"loss_on: {loss_on}" in said.out) == (loss_on != "not stated")


def test_two_files_and_the_tools_defaults(tmp_path: Path, dmt: Dmt) -> None:
    """The batch is that of the ranks; what the Trainer does by itself is stated."""
    arguments, config = tmp_path / "args.json", tmp_path / "ds.json"
    arguments.write_text(ARGUMENTS)
    config.write_text(DEEPSPEED.replace("0.001", '"auto"'))
    printed = dmt("init", "llama-3.1-8b", "--from", arguments, "--from", config, *MACHINE)
    (tmp_path / "recipe.yaml").write_text(printed.out)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert (recipe.training.global_batch_size, recipe.training.epochs) == (32, 3)
    assert (recipe.parallel.zero.stage, recipe.optimizer.betas) == (3, (0.9, 0.999))
    assert "# the Trainer's default" in printed.out
    assert f"{config}:2 zero_optimization.stage" in printed.out


TOKEN = "hf_abcdefghijklmnopqrstuvwxyzABCDEF12"
SECRETS = f"""base_model: meta-llama/Llama-3.1-8B
datasets:
  - path: https://user:hunter2secret@example.org/data.jsonl
    type: chat_template
  - token: hunter2secret
    path: b.jsonl
sequence_len: 2048
learning_rate: 1e-5
mlflow_tracking_uri: https://user:hunter2secret@mlflow.example.org
wandb_project: {TOKEN}
mlflow_experiment_name: e
hub_token: {TOKEN}
resume_from_checkpoint: s3://AKIAABCDEFGHIJKLMNOP:hunter2secret@bucket/x
"""


def test_no_credential_is_written(tmp_path: Path, dmt: Dmt) -> None:
    """They are not carried, and named without a value."""
    given, out = tmp_path / "sec.yaml", tmp_path / "recipe.yaml"
    given.write_text(SECRETS)
    printed = dmt("init", "llama-3.1-8b", "--from", given, *MACHINE, "--out", out)
    for text in (out.read_text(), printed.out, printed.err):
        assert "hunter2secret" not in text and TOKEN not in text and "***" not in text
    assert f"#   wandb_project ({given}:10): it has a cred" in out.read_text()
    assert LEFT_OPEN in out.read_text()


def test_yaml_as_pyyaml_reads_it_and_unknown_names(tmp_path: Path, dmt: Dmt) -> None:
    """A map's own keys win over merged ones, and the first of several maps over the others."""
    given = tmp_path / "axolotl.yaml"
    given.write_text("""
one: &one {seed: 1, weight_decay: 0.1}
two: &two {seed: 2, adam_beta2: 0.95, weight_decay: 0.2}
base_model: meta-llama/Llama-3.1-8B
sequence_len: 4_096
lora_rr: 8
learning_rate: 0.0003
seed: 7
<<: [*one, *two]
bf16: on
""")
    printed = dmt("init", "llama-3.1-8b", "--from", given, *MACHINE)
    (tmp_path / "recipe.yaml").write_text(printed.out)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    optimizer = recipe.optimizer
    assert (recipe.training.seed, optimizer.weight_decay, optimizer.betas[1]) == (7, 0.1, 0.95)
    assert (recipe.training.precision, recipe.training.sequence_length) == ("bf16", 4096)
    assert f"{given}:2 weight_decay" in printed.out
    assert f"lora_rr 8 ({given}:6): unknown to DMT, it may change" in printed.out
    assert "did you mean `lora_r`?" in printed.out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--from", "train.py", *MACHINE), "docs/coming-from.md"),
        (("--from", "args.json", *MACHINE), "the files name no model"),
        (("llama-3.1-8b", "--from", "args.json"), "NODESxGPUSxNAME"),
        (("llama-3.1-8b",), "--cluster: missing"),
        (MACHINE, "MODEL: missing"),
        (("llama-3.1-8b", "--from", "args.json", "--from", "ds.json", *MACHINE),
         "what learning_rate at args.json:3 says: 2.0e-05"),
        (("--from", "notes.txt", *MACHINE), "without `--flags`"),
        (("llama-3.1-8b", "--from", str(FILES / "axolotl/dpo.yaml"), "--task", "sft", *MACHINE),
         "the files are for dpo"),
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
    for name, text in {"args.json": ARGUMENTS, "ds.json": DEEPSPEED, "notes.txt": "x",
                       "train.py": "import torch"}.items():  # fmt: skip
        Path(name).write_text(text)
    assert error in " ".join(dmt("init", *words, code=2).err.split())
