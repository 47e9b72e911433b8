"""Published configurations of tools for pretraining become recipes and come back; mistakes in
them have a clear answer."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import ROOT
from toolkit.errors import RecipeError
from toolkit.extras.targets import megatron_lm
from toolkit.intake.load import load_recipe
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import HfSource
from toolkit.starter.from_files import joined
from toolkit.starter.imported import import_files
from toolkit.targets import accelerate
from toolkit.targets.base import TARGETS, Nearest, SettingSource
from toolkit.targets.compare import compare
from toolkit.targets.facts import facts
from toolkit.targets.files import recognised
from toolkit.targets.known_keys import ACCELERATE, SECTIONS

PUBLISHED = ROOT / "tests/targets/published"
LOCAL = "gpt-neox/local_setup.yml"
INITIAL = "output_layer_init_method"
NORMS = "optimizer.weight_decay (default)"
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
    Case(["gpt-neox/pythia-1.4b.yml"], "8x8xa100-40gb", frozenset({INITIAL})),
    Case(["gpt-neox/20B.yml"], "12x8xa100-40gb", frozenset({INITIAL})),
    Case(["gpt-neox/125M.yml", LOCAL], "8xa100-80gb", frozenset({INITIAL})),
    Case(["gpt-neox/bf16_125M.yml", LOCAL], "8xa100-80gb"),
    Case(
        ["gpt-neox/llama-7B.yml", "gpt-neox/llama-train_config.yml", LOCAL],
        "2x8xh100-80gb",
        frozenset({INITIAL, "finetune"}),
    ),
    Case(["torchtitan/llama3_8b.toml"], "8x8xa100-80gb", frozenset({NORMS})),
    Case(["torchtitan/llama3_70b.toml"], "8x8xa100-80gb", frozenset({NORMS})),
    Case(["torchtitan/debug_model.toml"], "8xa100-80gb", frozenset({NORMS})),
    Case(["torchtitan/qwen3_1.7b.toml"], "8xa100-80gb", frozenset({NORMS})),
    Case(
        ["torchtitan/llama3_8b.toml", "torchtitan/float8.sh"], "8xh100-80gb", frozenset({NORMS})
    ),
    Case(
        ["megatron-bridge/llama3_8b_pretrain_override_example_megatron_fsdp.yaml"],
        "8xh100-80gb",
    ),
    Case(["megatron-bridge/quick_start.sh"], "8xh100-80gb"),
    Case(["megatron-bridge/train_llama32_1b.sh"], "8xh100-80gb"),
    Case(["megatron-bridge/indexed_data.sh"], "8xh100-80gb"),
    Case(["megatron-bridge/qwen3_moe_30b_a3b_pretrain_override_example.yaml"], "2x8xh100-80gb"),
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


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that no shipped recipe has, in the hub's cache."""
    base = load_recipe(ROOT / "recipes/qwen/qwen3-30b-a3b-pretrain.yaml").model.config
    repository = tmp_path / "hub/models--Qwen--Qwen3-30B-A3B"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(base))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def imported(
    files: Sequence[Path], cluster: str, recipe: Path, model: str | None = None
) -> set[str]:
    """Write the recipe of the files; return the names of what it does not carry."""
    made = import_files(files, model, cluster, None, None)
    assert made.problem == ""
    recipe.write_text(made.text)
    return {one.name for one in made.uncarried}


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_published_configuration_becomes_a_recipe_and_comes_back(
    case: Case, tmp_path: Path
) -> None:
    files = [PUBLISHED / name for name in case.files]
    listed = imported(files, case.cluster, tmp_path / "recipe.yaml", case.model)
    read = [(target, parsed, target.read(parsed, None)) for target, parsed in joined(files)]
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

    target, _, source = read[0]
    adapted = target.adapt(recipe)
    suffix = Path(case.files[0]).suffix if target.engine == "" else ".sh"
    rendered = tmp_path / f"rendered{suffix}"
    rendered.write_text(target.write(adapted, plan_recipe(adapted, explained=False))[0])
    again = [rendered, *files[1:]] if len(read) > 1 else [rendered]
    imported(again, case.cluster, tmp_path / "again.yaml", case.model)
    first, written = facts(recipe, None), load_recipe(tmp_path / "again.yaml")
    second = facts(written, plan_recipe(written, explained=False)) | facts(written, None)
    known = {one.key for one in source.stated} & first.keys()
    if any("$" in one.at.written for one in source.stated if one.key == "data.train.prefix"):
        known -= {"data.validation_fraction"}  # written next to data that are known
    lost = {
        key: (first[key].value, second[key].value if key in second else None)
        for key in known
        if key not in second or second[key].value != first[key].value
    }
    assert lost == {}


def test_every_setting_of_the_validation_data_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "llama3_8b.toml"
    validation = 'enable = true\ndataset = "c4_validation"\nfreq = 50\nsteps = 4\n'
    published = (PUBLISHED / "torchtitan/llama3_8b.toml").read_text()
    file.write_text(f"{published}\n[validation]\n{validation}")
    imported([file], "8x8xa100-80gb", tmp_path / "recipe.yaml")
    recipe = load_recipe(tmp_path / "recipe.yaml")
    source = recipe.data.validation
    assert isinstance(source, HfSource)
    assert (source.path, source.name, source.split) == ("allenai/c4", "en", "validation")
    assert (recipe.evaluation.every_steps, recipe.evaluation.batches) == (50, 4)


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ('"max_steps": 9, "num_train_epochs": 3', "num_train_epochs", "not in effect next to"),
        ('"save_strategy": "epoch", "save_steps": 5', "save_steps", "not in effect: save_str"),
        ('"save_strategy": "epoch"', "save_strategy", "checkpoint.every_steps is a number"),
        ('"max_steps": -1', "max_steps", "has no effect"),
        ('"warmup_ratio": 1.5', "warmup_ratio", "not a share of the steps"),
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


NEOX, TITAN = "gpt-neox/125M.yml", "torchtitan/llama3_8b.toml"
BRIDGE = "megatron-bridge/train_llama32_1b.sh"
MEGATRON_SH, FSDP = "megatron-lm/mixtral_8x7b.sh", "accelerate/fsdp2.yaml"


def test_pythias_file_is_the_shipped_recipe(tmp_path: Path) -> None:
    """Which was written from the paper and the hub's config, not from this file."""
    imported([PUBLISHED / "gpt-neox/pythia-1.4b.yml"], "8x8xa100-40gb", tmp_path / "new.yaml")
    first = facts(load_recipe(ROOT / "recipes/pythia/pythia-1.4b-pretrain.yaml"), None)
    second = facts(load_recipe(tmp_path / "new.yaml"), None)
    names = """training.steps training.sequence_length training.global_batch_size
    optimizer.learning_rate optimizer.betas optimizer.eps optimizer.weight_decay
    optimizer.clip_grad_norm schedule.name schedule.warmup_steps schedule.min_learning_rate"""
    sizes = [key for key in first if key.startswith("model.config.")]
    keys = [*names.split(), *sizes]
    other = {key for key in keys if first[key].value != second.get(key, first[key]).value}
    # The hub's config has transformers' own deviation, and gelu for its approximation by tanh.
    assert other == {"model.config.initializer_range", "model.config.hidden_act"}


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
         "a run has one sequence length"),
        (NEOX, '"lr_decay_iters": 320000', '"lr_decay_iters": 300000', "every decay ends with"),
        (NEOX, '"lr_decay_style": "cosine"', '"lr_decay_style": "sqrt"', "no sqrt decay"),
        (TITAN, "compile = false", 'compile = false\ndtype = "bfloat16"', "gradients"),
        (TITAN, 'flavor = "8B"', 'flavor = "8B"\nconverters = ["mx"]', "no converter mx"),
        (TITAN, 'name = "AdamW"', 'name = "Adam"', "optimizer.name has other settings"),
        (BRIDGE, "scheduler.lr_decay_iters=10", "mixed_precision=bf16_with_fp8", "fp8 and fp4"),
        (BRIDGE, "scheduler.lr_decay_iters=10", "train.rampup_batch_size=[1,1]", "here"),
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


def test_no_option_of_megatron_lm_and_accelerate_is_left_without_its_own_reason() -> None:
    assert megatron_lm.megatron_options() <= megatron_lm._table().keys()
    arguments = ACCELERATE.union(*SECTIONS.values()) - accelerate.KEYS.keys()
    assert arguments <= {*SECTIONS, "deepspeed_config_file", "fp16"}


def test_a_linear_decay_to_a_lowest_rate_is_not_written_for_gpt_neox(tmp_path: Path) -> None:
    """There it ends at 0, and is cut off."""
    pythia = ROOT / "recipes/pythia/pythia-1.4b-pretrain.yaml"
    prefix = f"data.train={{kind: megatron, prefix: {tmp_path}/x}}"
    for rate, refused in (("0", ()), ("1e-5", ("schedule.min_learning_rate",))):
        lowest = f"schedule.min_learning_rate={rate}"
        recipe = load_recipe(pythia, [prefix, "schedule.name=linear", lowest])
        problems = TARGETS["gpt-neox"].problems(recipe, plan_recipe(recipe, explained=False))
        assert tuple(problem.key for problem in problems) == refused


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
