"""Published configurations of tools for pretraining become recipes; mistakes in
them have a clear answer."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import ROOT
from toolkit.foreign.base import Nearest, SettingSource
from toolkit.foreign.compare import compare
from toolkit.foreign.facts import facts
from toolkit.foreign.files import recognised
from toolkit.intake.load import load_recipe
from toolkit.plan.planner import plan_recipe
from toolkit.starter.imported import import_files

PUBLISHED = ROOT / "tests/foreign/published"
ARGUMENTS = "accelerate/training/arguments.json"
LLAMA = "llama-3.1-8b"
MEGATRON = frozenset({"--init-method-std"})
FP8 = frozenset(
    ("--apply-layernorm-1p", "--decoupled-lr", "--decoupled-min-lr", "--fp8-amax-compute-algo",
     "--fp8-amax-history-len", "--fp8-format", "--fp8-param-gather", "--grad-reduce-in-bf16")
)  # fmt: skip
DECAY = "--lr-decay-iters"
BALANCE = {"megatron.moe_router_load_balancing_type", "megatron.moe_aux_loss_coeff"}


@dataclass(frozen=True)
class Case:
    """Files given together, and what changes training in them without a counterpart."""

    files: Sequence[str]
    cluster: str
    changes: frozenset[str] = frozenset()
    model: str | None = None
    """What the user states, where the files name none."""
    unknown: tuple[str, ...] = ()
    """Arguments of a script of its own."""
    differs: Collection[str] = ()
    """What the closest model has otherwise."""

    def __str__(self) -> str:
        return Path(self.files[-1]).stem if "sh" in self.files[-1] else Path(self.files[0]).stem


CASES = [
    Case(
        ["megatron-lm/gpt3_175b.sh"],
        "16x8xa100-80gb",
        MEGATRON | {DECAY, "--rampup-batch-size"},
    ),
    Case(["megatron-lm/mixtral_8x7b.sh"], "4x8xh100-80gb", MEGATRON | {DECAY}, differs=BALANCE),
    Case(["megatron-lm/llama3_8b_fp8.sh"], "8xh100-80gb", MEGATRON | FP8),
    Case(["megatron-lm/gpt_345m.sh"], "1xa100-80gb", frozenset({DECAY})),
    Case(["megatron-lm/gpt_345m_tp2_pp2.sh"], "8xa100-80gb", frozenset({DECAY})),
    Case(["accelerate/fsdp.yaml", ARGUMENTS], "2xh100-80gb"),
    Case(["accelerate/fsdp2.yaml", ARGUMENTS], "8xh100-80gb"),
    Case(["accelerate/cp.yaml", ARGUMENTS], "8xh100-80gb"),
    Case(["accelerate/deepspeed_zero2.yaml", ARGUMENTS], "8xh100-80gb"),
    Case(["accelerate/deepspeed_zero3.yaml", ARGUMENTS], "1xh100-80gb"),
    Case(["trainer/run_clm.json"], "8xh100-80gb"),
    Case(["trainer/trainer_guide.json"], "8xh100-80gb", model=LLAMA),
    Case(["trainer/fsdp_guide.json"], "8xh100-80gb", model=LLAMA),
    Case(["trainer/vicuna_7b.json"], "8xh100-80gb", model=LLAMA, unknown=("lazy_preprocess",)),
    Case(["trainer/alpaca_deepspeed.json"], "8xh100-80gb", model=LLAMA),
]


def imported(
    files: Sequence[Path], cluster: str, recipe: Path, model: str | None = None
) -> set[str]:
    """Write the recipe of the files; return the names of what it does not carry."""
    made = import_files(files, model, cluster, None, None)
    assert made.problem == ""
    recipe.write_text(made.text)
    return {one.name for one in made.uncarried}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_published_configuration_becomes_a_recipe(case: Case, tmp_path: Path) -> None:
    files = [PUBLISHED / name for name in case.files]
    listed = imported(files, case.cluster, tmp_path / "recipe.yaml", case.model)
    opened = [recognised(file, "--from") for file in files]
    read = [(target, parsed, target.read(parsed, None)) for target, parsed in opened]
    leftovers = [one for _, _, source in read for one in source.leftovers]
    changing = {one.at.name for one in leftovers if one.reason.startswith("changes ")}
    unknown = tuple(one.name for _, _, source in read for one in source.unknown)
    assert (changing, unknown) == (case.changes, case.unknown)
    assert listed >= {one.at.name for one in leftovers}

    recipe = load_recipe(tmp_path / "recipe.yaml")
    plan = plan_recipe(recipe, explained=False)
    for target, parsed, source in read:
        nearest = {one.key for one in source.stated if isinstance(one.value, Nearest)}
        nearest |= {*case.differs}
        report = compare(target.read(parsed, recipe), facts(recipe, plan))
        assert {row.key for row in report.conflicts} <= nearest, report.conflicts


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ('"max_steps": 9, "num_train_epochs": 3', "num_train_epochs", "not in effect next to"),
        ('"save_strategy": "epoch", "save_steps": 5', "save_steps", "not in effect: save_str"),
        ('"save_strategy": "epoch"', "save_strategy", "checkpoint.every_steps is a number"),
        ('"max_steps": -1', "max_steps", "has no effect"),
        ('"warmup_ratio": 0.1, "warmup_steps": 9', "warmup_ratio", "not in effect next"),
        ('"report_to": ["comet_ml"]', "report_to", "no comet_ml"),
        ('"neftune_noise_alpha": 5', "neftune_noise_alpha", "changes training: no noise"),
        ('"group_by_length": true', "group_by_length", "changes training: the seed decides"),
        ('"label_smoothing_factor": 0.0', "label_smoothing_factor", "has no effect"),
        ('"label_smoothing_factor": 0.1', "label_smoothing_factor", "changes training: the l"),
        ('"optim_args": "x=1"', "optim_args", "changes training: an optimizer"),
        ('"dataloader_num_workers": 4', "dataloader_num_workers", "memory or speed only"),
        ('"deepspeed": {"zero_optimization": {"overlap_comm": true}}',
         "deepspeed.zero_optimization.overlap_comm", "memory or speed only"),
        ('"deepspeed": {"prescale_gradients": true}', "deepspeed.prescale_gradients",
         "changes training: gradients are"),
        ('"deepspeed": {"optimizer": {"params": {"eps": "auto"}}}',
         "deepspeed.optimizer.params.eps", "no file states optimizer.eps"),
    ],
)  # fmt: skip
def test_nothing_of_the_trainers_is_dropped_in_silence(
    text: str, name: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "args.json").write_text(f'{{"learning_rate": 1e-5, {text}}}')
    made = import_files([tmp_path / "args.json"], LLAMA, "8xh100-80gb", None, None)
    (found,) = [one.reason for one in made.uncarried if one.name == name]
    assert found.startswith(reason)


MEGATRON_SH, FSDP = "megatron-lm/mixtral_8x7b.sh", "accelerate/fsdp2.yaml"


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
    ("name", "old", "new", "reason"),
    [
        (MEGATRON_SH, "--bf16", "--bf16 --eod-mask-loss", "the loss counts"),
        (MEGATRON_SH, "--bf16", "--bf16 --moe-z-loss-coeff 1e-3", "model.balance has"),
        (FSDP, "machine_rank: 0", "machine_rank: 0\nfp8_config: {fp8_margin: 1}", "write the"),
    ],
)  # fmt: skip
def test_what_changes_training_is_named_as_such(
    name: str, old: str, new: str, reason: str, tmp_path: Path
) -> None:
    source = changed(name, old, new, tmp_path)
    reasons = [one.reason for one in source.leftovers]
    assert any(text.startswith(f"changes training: {reason}") for text in reasons), reasons
