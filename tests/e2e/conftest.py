"""A small recipe with its own data, and two runs of it that many tests compare with."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.product import Ended, dmt, run, settings

RECIPE = """
name: e2e
model:
  config:
    model_type: llama
    vocab_size: 320
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    max_position_embeddings: 64
    tie_word_embeddings: true
data:
  train: {kind: text, files: ["data/*.txt"]}
  validation_fraction: 0.2
  tokenizer: bytes
training:
  steps: 20
  sequence_length: 32
  global_batch_size: 8
  micro_batch_size: 2
  precision: fp32
  seed: 7
optimizer: {learning_rate: 3.0e-3}
schedule: {name: constant}
evaluation: {batches: 4}
parallel: {engine: ddp}
cluster: {nodes: 1, gpus_per_node: 2, gpu: cpu}
logging: {every_steps: 1}
"""
WORDS = (
    "a",
    "model",
    "reads",
    "tokens",
    "and",
    "learns",
    "which",
    "of",
    "them",
    "comes",
    "next",
)
ZERO_2 = {"parallel.engine": "deepspeed", "parallel.zero.stage": 2}
WANDB = {"logging.trackers": ["wandb"]}


def write_project(folder: Path) -> Path:
    """Write data and recipe into `folder`; return the recipe's path."""
    (folder / "data").mkdir()
    chance = random.Random(0)
    for number in range(40):
        text = " ".join(chance.choices(WORDS, k=60 + number))
        (folder / "data" / f"{number:02}.txt").write_text(text + "\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    return recipe


@dataclass(frozen=True)
class Project:
    """A user's folder: recipe, data and runs."""

    folder: Path
    name: str = "recipe.yaml"

    @property
    def recipe(self) -> Path:
        return self.folder / self.name

    def command(
        self, run_dir: str, changes: Mapping[str, object] | None = None, *more: str
    ) -> list[str]:
        """`dmt launch` of the recipe."""
        return dmt("launch", self.recipe, "--run-dir", run_dir, *settings(changes or {}), *more)

    def launch(
        self,
        run_dir: str,
        changes: Mapping[str, object] | None = None,
        *more: str,
        env: Mapping[str, str] | None = None,
        code: int | None = 0,
    ) -> Ended:
        """Run `dmt launch` to its end, which has this exit code; None: any."""
        argv = self.command(run_dir, changes, *more)
        return run(argv, self.folder, env, code=code)


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project that reference runs and most tests share."""
    folder = tmp_path_factory.mktemp("project")
    write_project(folder)
    return Project(folder)


@pytest.fixture
def own_project(tmp_path: Path) -> Project:
    """A project for a test that changes recipe or data."""
    write_project(tmp_path)
    return Project(tmp_path)


@pytest.fixture(scope="session")
def ddp_run(project: Project) -> Path:
    """Run directory of 20 uninterrupted steps: ddp, two ranks, the local launcher."""
    project.launch("ddp")
    return project.folder / "ddp"
