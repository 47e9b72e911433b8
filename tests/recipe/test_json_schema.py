"""`dmt schema`, judged by a validator: shipped recipes are good, planted mistakes are not."""

import json
from typing import Any

import pytest
from jsonschema import Draft7Validator
from ruamel.yaml import YAML

from tests.processes import ROOT
from toolkit.cli.main import main
from toolkit.intake.layers import read_layers
from toolkit.recipe.places import shipped_recipes

COMPLETE = ROOT / "recipes" / "tiny" / "llama-bytes.yaml"


@pytest.fixture(scope="module")
def validator() -> Draft7Validator:
    from toolkit.recipe.json_schema import json_schema

    schema = json.loads(json.dumps(json_schema()))
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def load(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def mistakes(validator: Draft7Validator, recipe: Any) -> list[str]:
    """The dotted key of each mistake, and the rule that it breaks."""
    return [
        f"{'.'.join(map(str, found.absolute_path))}: {found.validator}"
        for found in validator.iter_errors(recipe)
    ]


def test_shipped_recipes_are_good(validator: Draft7Validator) -> None:
    """Each as a whole, and its file alone."""
    for file in shipped_recipes().values():
        assert not mistakes(validator, read_layers(file, ()).merged.data), file
        if file.is_file():
            assert not mistakes(validator, load(file.read_text(encoding="utf-8"))), file


@pytest.mark.parametrize(
    ("key", "value", "broken"),
    [
        ("trainning", {}, ": additionalProperties"),
        ("training.step", 5, "training: additionalProperties"),
        ("training.steps", "five", "training.steps: anyOf"),
        ("training.steps", 0, "training.steps: anyOf"),
        ("training.precision", "fp17", "training.precision: enum"),
        ("parallel.zero.stage", 4, "parallel.zero.stage: anyOf"),
        ("parallel.tensor", "automatic", "parallel.tensor: anyOf"),
        ("data.train", {"kind": "hff", "path": "x"}, "data.train: anyOf"),
        ("optimizer.betas", [0.9], "optimizer.betas: minItems"),
        ("logging.project", "a/b", "logging.project: pattern"),
        ("extends", 3, "extends: anyOf"),
        ("name", "", "name: pattern"),
    ],
)
def test_planted_mistakes(
    validator: Draft7Validator, key: str, value: object, broken: str
) -> None:
    recipe = load(COMPLETE.read_text(encoding="utf-8"))
    inside, *path = recipe, *key.split(".")
    for name in path[:-1]:
        inside = inside.setdefault(name, {})
    inside[path[-1]] = value
    assert mistakes(validator, recipe) == [broken]


def test_what_a_file_need_not_state(validator: Draft7Validator) -> None:
    """Only a recipe that extends no other states every setting without a default."""
    recipe = load(COMPLETE.read_text(encoding="utf-8"))
    del recipe["name"], recipe["training"]["sequence_length"]
    assert mistakes(validator, recipe) == [": required", "training: required"]
    assert not mistakes(validator, recipe | {"extends": ["recipes:tiny/llama-bytes.yaml"]})


def test_every_setting_has_a_text(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capfd.readouterr().out)
    sections = [schema, *schema["$defs"].values()]
    silent = [
        name
        for section in sections
        for name, setting in section["properties"].items()
        if name != "kind" and not setting.get("description") and "$ref" not in str(setting)
    ]
    assert not silent and schema["$id"].startswith("urn:dmt:recipe:")
