"""A dumped recipe loads back to an equal one, whatever it holds."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from tests.recipe.good import GOOD
from toolkit.intake.load import load_recipe
from toolkit.recipe.dump import dump_recipe
from toolkit.recipe.schema import Recipe

CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters="\0")
TEXTS = st.text(CHARACTERS, min_size=1)
TRICKY = st.sampled_from([
    "yes", "off", "null", "~", "1_000", "0o7", "1e3", ".inf", "3", "-", "a: b", "a #b", " a ",
    "'", '"', "\\", "\n", "a\n", "\x85", "\u2028", "\ufeff", "🚀", "[a]", "{stdlib}/*.py", "*a",
])  # fmt: skip
ANY_TEXT = TEXTS | TRICKY
FLOATS = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    data = Recipe.model_validate(YAML(typ="safe").load(GOOD)).model_dump()
    data["data"]["train"]["files"] = ["/" + text for text in draw(st.lists(TEXTS, min_size=1))]
    data["data"]["tokenizer_revision"] = draw(st.none() | ANY_TEXT)
    data["optimizer"]["eps"] = draw(FLOATS)
    data["optimizer"]["learning_rate"] = draw(st.floats(1e-4, 1e300))
    data["training"]["seed"] = draw(st.integers(0, 2**40))
    data["parallel"]["sequence"] = draw(st.sampled_from(["auto", False]))
    return Recipe.model_validate(data)


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of this machine may make a generated text look like a secret."""
    monkeypatch.setattr("toolkit.intake.layers.looks_secret", lambda *_: False)


@pytest.mark.usefixtures("no_environment")
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(recipe=recipes())
def test_round_trip(tmp_path: Path, recipe: Recipe) -> None:
    path = tmp_path / "dumped.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    loaded = load_recipe(path)
    expected = recipe.data.train.model_copy(
        update={"files": tuple(str(Path(file)) for file in recipe.data.train.files)}
    )
    assert loaded.data.train == expected
    update = {"data": recipe.data.model_copy(update={"train": expected})}
    assert loaded == recipe.model_copy(update=update)


def test_every_default_is_written(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    recipe = load_recipe(path)
    stated = YAML(typ="safe").load(dump_recipe(recipe))
    assert Recipe.model_fields.keys() == stated.keys()
    assert stated["parallel"]["zero"] == recipe.parallel.zero.model_dump()


def test_floats_are_floats_in_yaml_1_1_too(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    text = dump_recipe(load_recipe(path, ["optimizer.eps=1e-8"]))
    assert "eps: 1.0e-08" in text


def test_works_from_another_folder(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD.replace("{stdlib}", "texts"))
    recipe = load_recipe(path)
    moved = tmp_path / "runs" / "recipe.yaml"
    moved.parent.mkdir()
    moved.write_text(dump_recipe(recipe))
    assert load_recipe(moved) == recipe
