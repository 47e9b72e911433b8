"""Adapters of a pretrained model: trained in two layouts one after the other, and exported.
What the exports compute is in tests/checkpoint/test_reshape.py."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaForCausalLM

from tests.e2e.conftest import Project, write_project
from tests.e2e.product import curve, dmt, run
from toolkit.intake.load import load_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
]

LORA = {
    "model.init": "pretrained",
    "adapter": "{rank: 4, alpha: 8}",
    "optimizer.weight_decay": 0,
    "checkpoint.every_steps": 3,
    "training.steps": 6,
}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with a pretrained model in `base`, and a run of six steps that began in tensor
    parallel and ended with ZeRO-3."""
    folder = tmp_path_factory.mktemp("lora")
    project = Project(folder)
    config = load_recipe(write_project(folder)).model.config
    torch.manual_seed(3)
    LlamaForCausalLM(AutoConfig.for_model(**config)).save_pretrained(folder / "base")
    lora = LORA | {"model.hub": "base"}
    begin = {
        "parallel.engine": "megatron", "parallel.tensor": 2, "parallel.sequence": "true",
        "training.steps": 3,
    }  # fmt: skip
    end = {"parallel.engine": "deepspeed", "parallel.zero.stage": 3}
    for changes in (begin, end):
        project.launch("moved", lora | changes)
    return project


def test_checkpoints_are_whole_and_hold_no_base(tuned: Project) -> None:
    run(dmt("checkpoint", "verify", "moved"), tuned.folder, code=0)
    size = sum(
        path.stat().st_size
        for path in (tuned.folder / "moved/checkpoints/step-00000006").glob("state-*")
    )
    adapters = load_file(tuned.folder / "moved/export/adapter_model.safetensors")
    elements = sum(tensor.numel() for tensor in adapters.values())
    assert 12 * elements < size < 14 * elements + 40_000


def test_training_goes_on_from_an_export(tuned: Project) -> None:
    """A new run begins with the merged model of an old one; not with its checkpoint."""
    export = dmt("checkpoint", "export", "moved", "base-and-adapters", "--merged")
    run(export, tuned.folder, code=0)
    changes = LORA | {"model.hub": "base-and-adapters", "training.steps": 1}
    ended = tuned.launch("more", changes)
    first, before = curve(tuned.folder / "more")[1][0], curve(tuned.folder / "moved")
    assert first < before[1][0] - 0.02
    changes = {"model.init": "checkpoint", "model.checkpoint": "moved"}
    ended = tuned.launch("from-adapters", changes, code=2)
    assert "step-00000006 holds adapters, not a model" in ended.err
    assert "--merged" in ended.err


def test_another_base_is_refused(tuned: Project) -> None:
    folder = tuned.folder
    weights = folder / "base" / "model.safetensors"
    first = weights.read_bytes()
    tensors = {name: 1.01 * tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    more = LORA | {"model.hub": "base", "training.steps": 7}
    ended = tuned.launch("moved", more, code=2)
    exported = run(dmt("checkpoint", "export", "moved", "wrong", "--merged"), folder)
    weights.write_bytes(first)
    for refused in (ended, exported):
        assert refused.code == 2
        assert "holds adapters of another base: the weights of" in refused.err
    assert not (folder / "wrong").exists()
    tuned.launch("moved", more)
