"""Every sized recipe: valid, the published shape, and sensible numbers."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.dmt import Dmt
from toolkit.intake.layers import read_layers
from toolkit.intake.load import load_recipe
from toolkit.models.families import attention, model_spec
from toolkit.models.model import check_config
from toolkit.plan.hardware.catalogue import accelerator
from toolkit.recipe.places import shipped_recipes
from toolkit.recipe.schema import Recipe, RowsSource

RECIPES = Path(__file__).parent.parent / "recipes"
SIZED = [path for path in shipped_recipes().values() if path.parent.name != "tiny"]
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
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "smollm3-3b": 3_075_098_624,
    "phi-4": 14_659_507_200,
    "granite-3.0-2b": 2_533_531_648,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    # The last three without their vision tower.
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-27b": 27_009_346_304,
    "llama-4-scout": 107_769_861_120,
    # Mixtures of many experts; the last two without a layer for multi-token prediction.
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "glm-4.5-air": 106_852_245_504,
    "deepseek-v3": 671_026_404_352,
}
WITH_VISION = {"gemma-3-4b", "gemma-3-27b", "llama-4-scout"}
"""Sizes whose published checkpoint is not of their text model."""
PRETRAINED = set(PARAMETERS) - {"qwen3-1.7b", "qwen3-14b"}
TOO_LARGE = {"llama-3.1-70b", "olmo-3-32b", "qwen3-32b"}
"""Full fine-tuning of these needs more than the one machine of the other recipes."""
CHATTY = {
    "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b", "qwen3-0.6b",
    "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "mistral-7b",
    "gemma-3-1b", "granite-3.0-2b", "smollm3-3b", "olmo-3-7b", "olmo-3-32b",
}  # fmt: skip
"""Sizes with recipes for conversations, and for preferences of their post-trained weights."""
DATA = {
    "pretrain": {
        ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train"),
        ("HuggingFaceFW/fineweb", "default", "train"),
        ("monology/pile-uncopyrighted", None, "train"),
        ("HuggingFaceTB/finemath", "finemath-3plus", "train"),
        ("bigcode/starcoderdata", None, "train"),
        ("HuggingFaceFW/fineweb-2", "fra_Latn", "train"),
    },
    "sft": {("HuggingFaceH4/ultrachat_200k", None, "train_sft")},
    "lora": {("HuggingFaceH4/ultrachat_200k", None, "train_sft")},
    "dpo": {("HuggingFaceH4/ultrafeedback_binarized", None, "train_prefs")},
}


@cache
def load(path: Path) -> Recipe:
    return load_recipe(path)


def named(path: Path) -> tuple[str, str]:
    """Size and task of `SIZE-TASK`, or of `SIZE-TASK-32k` with longer rows."""
    size, _, task = re.sub(r"-\d+k$", "", path.stem).rpartition("-")
    return size, task


def is_longer(path: Path) -> bool:
    return path.stem.endswith("k")


def text(path: Path) -> str:
    """The recipe and the files that it extends."""
    files = map(Path, read_layers(path, ()).files[:-1])
    return "".join(file.read_text() for file in files if file.is_file())


def test_every_yaml_is_a_run_by_itself(dmt: Dmt) -> None:
    """As in `dmt check recipes/**/*.yaml`: what only others extend ends in .yml."""
    files = sorted({*RECIPES.rglob("*.yaml"), *SIZED})
    assert dmt("check", *files).out.count("✓ ") == len(files) > len(SIZED)
    assert len([*RECIPES.rglob("*.y*ml")]) <= 66


def test_there_is_a_recipe_for_every_size() -> None:
    sizes = {
        "pretrain": PRETRAINED, "sft": CHATTY - TOO_LARGE, "lora": CHATTY, "dpo": CHATTY,
    }  # fmt: skip
    assert {named(path) for path in SIZED} == {
        (size, task) for task in sizes for size in sizes[task]
    }


@pytest.mark.parametrize("path", SIZED, ids=NAMES)
def test_what_a_recipe_states(path: Path) -> None:
    """The published shape, where weights, data and tokenizer come from, a sensible schedule and
    batch, and a source of its numbers."""
    recipe, (size, task) = load(path), named(path)
    config, training = recipe.model.config, recipe.training
    assert recipe.name == path.stem and config is not None and check_config(config) == []
    spec = model_spec(config)
    assert spec.parameters.total == PARAMETERS[size]
    assert f"{spec.parameters.total:,} parameters" in text(path)
    assert training.sequence_length <= spec.max_positions
    if is_longer(path):
        assert f"-{training.sequence_length // 1024}k" in path.stem
        assert recipe.parallel.context == "auto" and recipe.data.isolates

    assert recipe.model.hub == (None if size in WITH_VISION else recipe.data.tokenizer)
    begins = task == "pretrain" and not is_longer(path)
    assert recipe.model.init == ("random" if begins else "pretrained")
    for train in recipe.data.sources:
        assert isinstance(train, RowsSource)
        assert (train.path, train.name, train.split) in DATA[task]
    assert recipe.logging.trackers == ("wandb",)

    assert recipe.schedule.min_learning_rate < recipe.optimizer.learning_rate
    tokens_per_step = training.global_batch_size * training.sequence_length
    if training.epochs is None:
        steps = training.steps or (training.tokens or 0) / tokens_per_step
        assert 0 < recipe.schedule.warmup_steps < 0.1 * steps
        assert 0.4e6 < tokens_per_step < 25e6
    source = r"arXiv:\d{4}\.\d{5}|build-nanogpt|torchtune|alignment-handbook"
    assert re.search(source, text(path))


@pytest.mark.parametrize("path", SIZED, ids=NAMES)
def test_dmt_plan_says_that_it_fits_its_cluster(path: Path, dmt: Dmt) -> None:
    recipe = load(path)
    memory = accelerator(recipe.cluster.gpu).memory_gib
    assert memory is not None
    # Embedding and head are most of a small model's work, and masks of documents cost time.
    least = 0.2 if recipe.training.objective == "pretrain" else 0.15
    if model_spec(recipe.model.config or {}).experts > 8:
        least = 0.1  # small matrix products
    if model_spec(recipe.model.config or {}).every_expert:
        least = 0.05  # transformers computes all experts on every token
    if attention(recipe.model.config or {}) == "eager":
        least = 0.025  # scores go through memory
    if recipe.adapter is not None:
        least *= 2 / 3  # no products for gradients of frozen weights
    plan = dmt("plan", path, "--json").json["plans"][0]
    assert plan["fits"]
    assert 0.1 * memory < plan["memory_gib"]["total"] <= memory
    assert plan["layout"]["offload_optimizer"] == "none"
    assert least < plan["mfu"] < 0.65, "neither wasteful nor too good to be true"


@pytest.mark.parametrize("size", sorted(CHATTY))
def test_chats_train_the_base_and_preferences_what_has_a_template(size: str) -> None:
    paths = {path.name: path for path in SIZED}
    lora = paths[f"{size}-lora.yaml"]
    for task in ("sft", "lora", "dpo"):
        if f"{size}-{task}.yaml" not in paths:
            continue
        recipe = load(paths[f"{size}-{task}.yaml"])
        assert (recipe.data.chat_template is None) == (task == "dpo")
        assert recipe.data.packing == ("none" if task == "dpo" else "greedy")
        whole = recipe.adapter is None
        assert whole == (task == "sft" or (task == "dpo" and size not in TOO_LARGE))
        assert recipe.data.validation is not None
        chats = recipe.model.hub != load(lora).model.hub
        assert chats == (task == "dpo" and size != "qwen3-32b"), "32B has no base"


@pytest.mark.parametrize("path", [path for path in SIZED if named(path)[1] != "pretrain"])
def test_dmt_render(path: Path, dmt: Dmt) -> None:
    assert dmt("render", path, "--set", "parallel.engine=deepspeed").json
