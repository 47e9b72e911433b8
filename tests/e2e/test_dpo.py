"""A run of dpo from a file of preferences: the reference is computed once, and found again."""

import json
import random
from pathlib import Path
from shutil import rmtree

import pytest

from tests.e2e.conftest import RECIPE, WORDS, Project
from tests.e2e.product import events, records, run

TEXT = '{kind: text, files: ["data/*.txt"]}'
STEPS = 8
CHANGES: dict[str, object] = {"training.steps": STEPS, "training.global_batch_size": 4}
ZERO_3 = {"parallel.engine": "deepspeed", "parallel.zero.stage": 3}
COMPUTING = "computing the reference's log-probabilities"


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """40 pairs of answers of one to five words, and a cache of their own."""
    folder = tmp_path_factory.mktemp("preferences")
    chance = random.Random(1)

    def turn(role: str, words: int) -> list[dict[str, str]]:
        return [{"role": role, "content": " ".join(chance.choices(WORDS, k=words))}]

    lines = []
    for _ in range(40):
        answers = {
            name: turn("assistant", chance.randint(1, 5)) for name in ("chosen", "rejected")
        }
        lines.append(json.dumps({"prompt": turn("user", 3), **answers}))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    text = RECIPE.replace(TEXT, "{kind: preference, path: pairs.jsonl}")
    text = text.replace("tokenizer: bytes", "tokenizer: bytes\n  chat_template: chatml")
    text = text.replace("steps: 20", "steps: 8\n  objective: dpo")
    text = text.replace("sequence_length: 32", "sequence_length: 128")
    text = text.replace("max_position_embeddings: 64", "max_position_embeddings: 128")
    assert text.count("preference") == text.count("objective: dpo") == 1
    (folder / "recipe.yaml").write_text(text)
    return Project(folder)


def launch(project: Project, run_dir: str, changes: dict[str, object]) -> None:
    argv = project.command(run_dir, changes)
    run(argv, project.folder, {"DMT_CACHE": str(project.folder / "cache")}, code=0)


@pytest.fixture(scope="module")
def whole(preferences: Project) -> Path:
    """Run directory of an uninterrupted run."""
    launch(preferences, "whole", CHANGES)
    return preferences.folder / "whole"


def computed(run_dir: Path) -> list[bool]:
    """Whether each start of a run computed the reference."""
    return [COMPUTING in start["phases"] for start in events(run_dir, "start")]


def check_equal(run_dir: Path, whole: Path) -> None:
    for found, expected in zip(
        records(run_dir / "metrics.jsonl"), records(whole / "metrics.jsonl"), strict=True
    ):
        for name in ("loss", "grad_norm", "rewards/chosen", "rewards/margins"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name


@pytest.mark.slow
def test_the_first_rewards_are_0(whole: Path) -> None:
    first, *_, last = records(whole / "metrics.jsonl")
    assert first["loss"] == pytest.approx(0.6931471805599453, rel=1e-12)
    assert {first[f"rewards/{name}"] for name in ("chosen", "rejected", "margins")} == {0.0}
    assert last["loss"] < first["loss"] and last["rewards/margins"] > 0
    (validation,) = events(whole, "evaluation")
    assert validation["rewards/accuracies"] <= 1
    assert computed(whole) == [True]


@pytest.mark.slow
def test_another_run_finds_the_reference(preferences: Project, whole: Path) -> None:
    launch(preferences, "again", {**CHANGES, "parallel.engine": "megatron"})
    assert computed(preferences.folder / "again") == [False]
    check_equal(preferences.folder / "again", whole)


@pytest.mark.slow
def test_a_run_that_continues_without_it_computes_it_by_the_first_weights(
    preferences: Project, whole: Path
) -> None:
    launch(preferences, "half", {**CHANGES, "training.steps": 4})
    rmtree(preferences.folder / "cache" / "reference")
    launch(preferences, "half", {**CHANGES, **ZERO_3})
    assert computed(preferences.folder / "half")[-1]
    check_equal(preferences.folder / "half", whole)
