"""Names of earlier releases: one error that says what to do instead; null is accepted."""

import re
from pathlib import Path

import pytest
import yaml

from toolkit.cli.main import main
from toolkit.errors import RecipeError
from toolkit.intake.load import load_recipe
from toolkit.recipe.dump import dump_recipe
from toolkit.recipe.words import settings
from toolkit.removed import removed
from toolkit.run.changes import changes
from toolkit.run.directory import RunDirectory, refuse_other_run

BLEND = Path("recipes/tiny/llama-blend.yaml")
PLAIN = Path("recipes/tiny/llama-bytes.yaml")

REMOVED = removed()
OF_EACH_FORM = (
    *("fp8", "adapter.rslora", "data.train.at_end", "data.validation.exclude"),
    *("optimizer.muon", "parallel.zero.hpz", "guard.max_skips_in_a_row", "launch.mpi"),
    *("schedule.plateau.threshold", "training.batch_ramp.tokens", "data.stages.from_tokens"),
)
"""A section, settings in sections and in lists of them, with defaults of each type."""
REQUIRED = {
    "outer": {"replicas": 2, "every_steps": 10},
    "adapter": {"rank": 4, "alpha": 8},
    "batch_ramp": {"start": 4, "increment": 4, "steps": 10},
}
"""What a section must state."""


def with_setting(folder: Path, path: str, value: object) -> Path:
    """A recipe with one more setting, by its dotted path; of a list, in its first item."""
    file = folder / "recipe.yaml"
    recipe = load_recipe(BLEND if path.startswith("data.") else PLAIN)
    stated = yaml.safe_load(dump_recipe(recipe))
    inner = stated
    *sections, name = path.split(".")
    for section in sections:
        if section == "validation":
            source = {**inner["train"][0], "weight": None}
            inner |= {"validation": source, "validation_fraction": 0.0}
        inner[section] = inner.get(section) or dict(REQUIRED.get(section, {}))
        inner = inner[section]
        inner = inner[0] if isinstance(inner, list) else inner
    inner[name] = value
    if path.startswith("schedule.plateau."):
        stated["schedule"]["name"] = "plateau"
    file.write_text(yaml.safe_dump(stated))
    return file


def test_removed_settings_have_left_sections_that_are_there() -> None:
    """So each is an unknown key, whose error is that of the next test."""
    assert not REMOVED.settings.keys() & settings().keys()
    for path in REMOVED.settings:
        section = path.rpartition(".")[0]
        assert not section or section in settings() or section in REMOVED.settings, path


@pytest.mark.parametrize("path", OF_EACH_FORM)
def test_a_removed_setting(path: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(with_setting(tmp_path, path, {"a": 1}))
    problem = next(
        one for one in error.value.problems if re.sub(r"\[\d+\]", "", one.key) == path
    )
    assert problem.found == "a setting that was removed" and problem.line
    assert problem.fix == REMOVED.settings[path]
    for unset in (None, default := REMOVED.defaults.get(path)):
        load_recipe(with_setting(tmp_path, path, unset))
    if default in (0, 1):  # equal to a value of another type
        other = int(default) if isinstance(default, bool) else bool(default)
        with pytest.raises(RecipeError):
            load_recipe(with_setting(tmp_path, path, other))


@pytest.mark.parametrize("path", OF_EACH_FORM)
def test_a_removed_setting_that_was_not_set_is_no_change(path: str) -> None:
    *sections, name = path.split(".")
    old: object = {name: None}
    new: object = {}
    for section in reversed(sections):
        old, new = {section: old}, {section: new}
    assert not [*changes(old, new)]


@pytest.mark.parametrize(
    ("file", "now", "removed", "value"),
    [
        (PLAIN, ["schedule.name=plateau", "schedule.plateau={}"],
         "schedule.plateau.cooldown", 3),
        (PLAIN, ["training.batch_ramp={start: 4, increment: 4, steps: 9}"],
         "training.batch_ramp.tokens", 4096),
        (BLEND, [], "data.train.exclude", ["*_test.py"]),
    ],
)  # fmt: skip
def test_a_run_with_a_removed_setting_is_not_told_to_state_it(
    file: Path, now: list[str], removed: str, value: object, tmp_path: Path
) -> None:
    recipe = load_recipe(file, now)
    stored = yaml.safe_load(dump_recipe(recipe))
    section, inner, name = removed.split(".")
    one = stored[section][inner]
    (one[0] if isinstance(one, list) else one).update({"steps": None, name: value})
    run = RunDirectory(tmp_path)
    run.recipe.write_text(yaml.safe_dump(stored))
    with pytest.raises(RecipeError) as error:
        refuse_other_run(run, recipe)
    (problem,) = error.value.problems
    assert removed.startswith(problem.key)
    assert "--change" not in problem.fix and "to resume" not in problem.fix


@pytest.mark.parametrize(
    ("path", "value"),
    [(path, value) for path, values in REMOVED.values.items() for value in values],
)
def test_a_removed_value(path: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(with_setting(tmp_path, path, value))
    (problem,) = error.value.problems
    assert (problem.key, problem.found, problem.fix) == (
        path,
        value,
        REMOVED.values[path][value],
    )


@pytest.mark.parametrize("name", REMOVED.commands)
def test_a_removed_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(name.split()) == 2
    assert (
        capsys.readouterr().err
        == f"dmt: `dmt {name}` was removed\n  fix: {REMOVED.commands[name]}\n"
    )
