"""A project to fine-tune in, and what DMT's own worker makes of it."""

import pytest
import torch

from tests.e2e.conftest import Project, write_project
from tests.e2e.product import curve
from toolkit.intake.load import load_recipe
from toolkit.models import huggingface as hf

STEPS = 5
FINETUNE = f"""
extends: recipe.yaml
name: finetune
model: {{hub: ./start, init: pretrained}}
training: {{steps: {STEPS}}}
optimizer: {{weight_decay: 0.1, eps: 1.0e-3, clip_grad_norm: 1.8}}
schedule: {{name: cosine, warmup_steps: 2, min_learning_rate: 1.0e-4}}
"""
"""Two micro batches a step on each of two ranks. The gradients' norms are 1.65 to 2.1, so some
are clipped, and with this eps AdamW's steps depend on their scale."""


@pytest.fixture(scope="session")
def finetune(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A folder with data, first weights in `start/` and `finetune.yaml`."""
    folder = tmp_path_factory.mktemp("finetune")
    recipe = load_recipe(write_project(folder))
    config = hf.build_config(recipe.model)
    model = hf.empty_model(config, torch.device("cpu"))
    hf.fill(model, hf.weight_source(recipe.model, config, recipe.training.seed))
    model.save_pretrained(folder / "start")
    (folder / "finetune.yaml").write_text(FINETUNE, encoding="utf-8")
    return Project(folder, "finetune.yaml")


@pytest.fixture(scope="session")
def worker_losses(finetune: Project) -> list[float]:
    """The losses of `dmt launch finetune.yaml`: engine ddp, two ranks."""
    finetune.launch("worker")
    losses = [loss for loss, _ in curve(finetune.folder / "worker").values()]
    assert len(losses) == STEPS
    return losses
