"""Every sized recipe: valid, the published shape, and sensible numbers."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from toolkit.cli.main import main
from toolkit.hardware.catalogue import gpu
from toolkit.intake.load import load_recipe
from toolkit.models.config_check import check_config
from toolkit.models.families import model_spec
from toolkit.recipe.schema import HfSource, Recipe

RECIPES = Path(__file__).parent.parent / "recipes"
SIZED = sorted(path for path in RECIPES.glob("*/*.yaml") if path.parent.name != "tiny")
NAMES = [path.stem for path in SIZED]

PARAMETERS = {
    # As counted in the models' safetensors, or stated on their model cards.
    "gpt2-124m": 124_439_808,
    "pythia-1.4b": 1_414_647_808,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
}
FINE_TUNED = {
    "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-0.6b", "qwen3-4b", "qwen3-8b",
    "mistral-7b",
}  # fmt: skip


@cache
def load(path: Path) -> Recipe:
    return load_recipe(path)


def size_of(path: Path) -> str:
    return path.stem.rsplit("-", 1)[0]


def test_every_yaml_is_a_run_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """As in `dmt check recipes/**/*.yaml`: what only others extend ends in .yml."""
    files = sorted(map(str, RECIPES.rglob("*.yaml")))
    assert main(["check", *files]) == 0
    assert capsys.readouterr().out.count("\n") == len(files) > len(SIZED)


def test_there_is_a_recipe_for_every_size() -> None:
    expected = {f"{size}-pretrain" for size in PARAMETERS} | {
        f"{size}-finetune" for size in FINE_TUNED
    }
    assert set(NAMES) == expected


@pytest.mark.parametrize("path", SIZED, ids=NAMES)
def test_recipe_is_valid_and_has_the_published_number_of_parameters(path: Path) -> None:
    recipe = load(path)
    assert recipe.name == path.stem
    config = recipe.model.config
    assert config is not None
    assert check_config(config) == []
    spec = model_spec(config)
    assert spec.parameters.total == PARAMETERS[size_of(path)]
    assert f"{spec.parameters.total:,} parameters" in path.read_text()
    assert recipe.training.sequence_length <= spec.max_positions


@pytest.mark.parametrize("path", SIZED, ids=NAMES)
def test_recipe_names_where_weights_data_and_tokenizer_come_from(path: Path) -> None:
    recipe = load(path)
    assert recipe.model.hub == recipe.data.tokenizer
    assert recipe.model.init == ("pretrained" if path.stem.endswith("finetune") else "random")
    train = recipe.data.train
    assert isinstance(train, HfSource)
    assert (train.path, train.name, train.split) in {
        ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train"),
        ("HuggingFaceFW/fineweb", "default", "train"),
        ("monology/pile-uncopyrighted", None, "train"),
        ("timdettmers/openassistant-guanaco", None, "train"),
    }
    assert recipe.logging.wandb is not None
    assert recipe.logging.wandb.project == "dmt"


@pytest.mark.parametrize("path", SIZED, ids=NAMES)
def test_learning_rate_falls_and_warm_up_is_shorter_than_the_run(path: Path) -> None:
    recipe = load(path)
    training = recipe.training
    assert [training.steps, training.tokens, training.epochs].count(None) == 2
    assert recipe.schedule.min_learning_rate < recipe.optimizer.learning_rate
    tokens_per_step = training.global_batch_size * training.sequence_length
    if training.epochs is None:
        steps = training.steps or (training.tokens or 0) / tokens_per_step
        assert 0 < recipe.schedule.warmup_steps < 0.1 * steps
        assert 0.4e6 < tokens_per_step < 20e6


@pytest.mark.parametrize("path", SIZED, ids=NAMES)
def test_dmt_plan_says_that_it_fits_its_cluster(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = gpu(load(path).cluster.gpu).memory_gib
    assert memory is not None
    assert main(["plan", str(path), "--json", "--top", "1"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["fits"]
    assert 0.1 * memory < plan["memory_gib"]["total"] <= memory
    assert plan["layout"]["offload_optimizer"] == "none"
    assert 0.2 < plan["mfu"] < 0.65, "neither wasteful nor too good to be true"


@pytest.mark.parametrize("size", sorted(FINE_TUNED))
def test_fine_tuning_starts_from_the_shape_that_was_pretrained(size: str) -> None:
    (pretrain,) = RECIPES.glob(f"*/{size}-pretrain.yaml")
    finetune = pretrain.with_name(f"{size}-finetune.yaml")
    assert load(finetune).model.config == load(pretrain).model.config
    assert load(finetune).model.hub == load(pretrain).model.hub


@pytest.mark.parametrize("path", SIZED, ids=NAMES)
def test_every_hyperparameter_states_its_source(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"arXiv:\d{4}\.\d{5}|build-nanogpt|torchtune|alignment-handbook", text)
    assert text.startswith("# ")
