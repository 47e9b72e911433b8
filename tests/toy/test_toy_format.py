"""A data format of another package, known to every verb by its entry point alone."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.product import Ended, curve, succeeded

pytestmark = pytest.mark.slow
Verb = Callable[..., Ended]


@pytest.fixture
def verb(with_toys: Callable[..., Ended], tmp_path: Path) -> Verb:
    """Run a verb on a recipe that trains on a folder's texts as rows of CSV."""
    with (tmp_path / "rows.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["id", "body"])
        for number, path in enumerate(sorted((tmp_path / "data").glob("*.txt"))):
            rows.writerow([number, path.read_text()])
    train = "{kind: hf, path: rows.csv, text_field: body}"

    def start(name: str, *arguments: str, train: str = train, **changes: object) -> Ended:
        return with_toys(
            {"data.train": train, "training.steps": 3, **changes}, name, *arguments
        )

    return start


@pytest.mark.quick
def test_its_columns_are_checked(verb: Verb) -> None:
    succeeded(verb("check"))
    succeeded(verb("plan"))
    wrong = verb("check", train="{kind: hf, path: rows.csv}")
    assert wrong.code == 2
    assert "no column `text`; its columns are id, body" in wrong.err
    sliced = verb("data prepare", train="{kind: hf, path: rows.csv, split: 'train[:1%]'}")
    assert "`split: train[:1%]` is given for CSV files (`" in sliced.err


def test_the_data_commands_know_it(verb: Verb) -> None:
    shown = json.loads(succeeded(verb("data show", "--json")))
    texts = json.loads(
        succeeded(verb("data show", "--json", train="{kind: text, files: ['data/*.txt']}"))
    )
    assert shown == texts
    assert json.loads(succeeded(verb("data prepare", "--json")))["train"]["documents"] > 0


def test_it_trains(verb: Verb, tmp_path: Path) -> None:
    """As texts do."""
    succeeded(verb("launch", "--run-dir", "rows"))
    succeeded(verb("launch", "--run-dir", "texts", train="{kind: text, files: ['data/*.txt']}"))
    assert curve(tmp_path / "rows") == curve(tmp_path / "texts")


def test_a_recipe_with_it_is_rehearsed(verb: Verb) -> None:
    ended = verb("rehearse", "--layouts", "ddp*", "--steps", "2", "--json")
    assert json.loads(succeeded(ended))["layouts"]


def test_a_package_that_is_broken_concerns_its_files_alone(verb: Verb, site: Path) -> None:
    (site / "toy_format.py").write_text("import csv_kernels\n")
    succeeded(verb("check", train="{kind: text, files: ['data/*.txt']}"))
    ended = verb("data prepare")
    assert ended.code == 3
    assert "csv, which another package adds to dmt.formats as toy_format:CSV" in ended.err
