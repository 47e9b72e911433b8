"""Spaces of a search: each mistake is named with its line and its fix."""

from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from tests.processes import ROOT
from toolkit.errors import RecipeError
from toolkit.extras.tune.space import Space, load_space, overrides_of
from toolkit.intake.load import load_recipe

TINY = ROOT / "recipes/tiny/llama-bytes.yaml"


def space(tmp_path: Path, text: str) -> Space:
    file = tmp_path / "space.yaml"
    file.write_text(text, encoding="utf-8")
    return load_space(file, TINY)


def test_types_are_those_of_the_settings(tmp_path: Path) -> None:
    loaded = space(
        tmp_path,
        "optimizer.learning_rate: {low: 1.0e-4, high: 1, log: true}\n"
        "schedule.warmup_steps: {low: 0, high: 100, step: 10}\n"
        "optimizer.betas: [[0.9, 0.95], [0.9, 0.99]]\n"
        "parallel.zero.stage: [1, auto]\n"
        "model.config.hidden_size: {low: 64, high: 128, step: 64}\n",
    )
    assert loaded == {
        "optimizer.learning_rate": FloatDistribution(1e-4, 1.0, log=True),
        "schedule.warmup_steps": IntDistribution(0, 100, step=10),
        "optimizer.betas": CategoricalDistribution(("[0.9, 0.95]", "[0.9, 0.99]")),
        "parallel.zero.stage": CategoricalDistribution(("1", "auto")),
        "model.config.hidden_size": IntDistribution(64, 128, step=64),
    }
    overrides = overrides_of(
        {"optimizer.learning_rate": 1e-05, "optimizer.betas": "[0.9, 0.99]"}
    )
    optimizer = load_recipe(TINY, [*overrides, "schedule.min_learning_rate=0"]).optimizer
    assert (optimizer.learning_rate, optimizer.betas) == (1e-05, (0.9, 0.99))


@pytest.mark.parametrize(
    ("line", "key", "fix"),
    [
        ("schedule.warmup_steps: {low: 0.5, high: 2}", "schedule.warmup_steps", "integers"),
        ("training.seed: {low: 0, high: 9, step: 0.5}", "training.seed", "integers"),
        ("schedule.name: {low: 1, high: 2}", "schedule.name", "write choices"),
        ("optimizer: {eps: [1, 2]}", "optimizer", "`low` and `high`"),
        ("training.seed: 3", "training.seed", "--set training.seed=3"),
        ("training.seed: [3, 3]", "training.seed", "--set training.seed=VALUE"),
        ("cluster.nodes: [1, 2]", "cluster.nodes", "remove it"),
        ("data.tokenizer: [bytes, gpt2]", "data.tokenizer", "remove it"),
        ("optimizer.eps: {low: 1.0e-8, hig: 2}", "optimizer.eps", "`low` and `high`"),
        ("optimizer.eps: {low: 2, high: 1}", "optimizer.eps", "low <= high"),
        ("optimizer.eps: {low: 0, high: 1, log: true}", "optimizer.eps", "`low > 0`"),
        ("optimizer.eps: {low: 1, high: 2, log: true, step: 1}", "optimizer.eps", "`step`"),
        ("optimizer.eps: {low: yes, high: 2}", "optimizer.eps", "a number each"),
        ("optimizer.eps: {low: 1, high: 2, log: maybe}", "optimizer.eps", "`log` true"),
    ],
)  # fmt: skip
def test_mistakes(line: str, key: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        space(tmp_path, f"# a space\n{line}\n")
    problem = error.value.problems[0]
    assert (problem.key, problem.line) == (key, 2)
    assert problem.file == str(tmp_path / "space.yaml") and fix in problem.fix, problem


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("optimizer.learning_rat: [1, 2]", "`learning_rate`?"),
        ("optimizer.weight_decay: [-1, -2]", "write a number ≥ 0"),
        ("adapter.rank: [4, 8]", "add `alpha:`"),
    ],
)
def test_the_recipe_judges_both_ends(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        space(tmp_path, line)
    (problem,) = error.value.problems
    assert said in problem.fix and problem.file == str(tmp_path / "space.yaml")


def test_values_that_need_those_of_another_setting(tmp_path: Path) -> None:
    text = """
schedule.min_learning_rate: [1.0e-2, 1.0e-5]
optimizer.learning_rate: [1.0e-1, 1.0e-3]
adapter.rank: [4, 8]
adapter.alpha: [8, 16]
"""
    assert len(space(tmp_path, text)) == 4


def test_files_that_are_no_space(tmp_path: Path) -> None:
    for text in ("", "[1, 2]"):
        with pytest.raises(RecipeError, match="a map of settings"):
            space(tmp_path, text)
    with pytest.raises(RecipeError, match="name a YAML file"):
        load_space(tmp_path / "none.yaml", TINY)
