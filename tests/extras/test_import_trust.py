"""Files of other tools' checkpoints that would run code are refused, one for each format."""

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.making import MODEL, write_recipe
from tests.checkpoint.payloads import Canary, check_refused, nested, pickled, zipped
from tests.extras.megatron_files import write_megatron
from tests.models.small import filled
from toolkit.extras.convert.torch_dist import COMMON_FILE, DATA_FILE, METADATA
from toolkit.extras.imports.base import RecipeModel
from toolkit.extras.imports.dcp import DCP
from toolkit.extras.imports.megatron_dist import MEGATRON
from toolkit.extras.imports.run import recipe_model
from toolkit.extras.imports.trainer import TRAINER
from toolkit.intake.load import load_recipe
from toolkit.models.families import mapped


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RecipeModel:
    return recipe_model(load_recipe(write_recipe(tmp_path_factory.mktemp("recipe"))))


def trainer_folder(folder: Path) -> None:
    """A minimal checkpoint of the Trainer."""
    model = filled(MODEL)
    model.save_pretrained(folder)
    parameters = [*model.named_parameters()]
    groups = [
        {"params": [p for _, p in parameters if p.dim() > 1]},
        {"params": [p for _, p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict() | {"last_epoch": 1}, folder / "scheduler.pt")
    state = {"global_step": 1, "max_steps": 20}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def dcp_folder(folder: Path) -> None:
    weights = {name: p.detach() for name, p in filled(MODEL).named_parameters()}
    moments = {
        name: {"exp_avg": p, "exp_avg_sq": p, "step": torch.tensor(1.0)}
        for name, p in weights.items()
    }
    dcp.save(
        {"model": weights, "optim": {"state": moments}}, checkpoint_id=folder, no_dist=True
    )


def megatron_folder(folder: Path) -> None:
    weights = {name: p.detach() for name, p in filled(MODEL).named_parameters()}
    config = {"model_type": "llama", **(MODEL.config or {})}
    folder.rmdir()
    write_megatron(folder, mapped(config), weights)


def all_at_the_start(folder: Path, content: bytes) -> None:
    """Let the index say that every tensor is all of a data file, which is replaced."""
    index = pickle.loads((folder / METADATA).read_bytes())
    for key, place in index.storage_data.items():
        index.storage_data[key] = replace(place, offset=0, length=len(content))
    (folder / METADATA).write_bytes(pickle.dumps(index))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", [pickled, zipped])
@pytest.mark.parametrize(
    ("checkpoint", "make", "file"),
    [
        (TRAINER, trainer_folder, "optimizer.pt"),
        (TRAINER, trainer_folder, "scheduler.pt"),
        (DCP, dcp_folder, METADATA),
        (DCP, dcp_folder, DATA_FILE),
        (MEGATRON, megatron_folder, COMMON_FILE),
        (MEGATRON, megatron_folder, METADATA),
        (MEGATRON, megatron_folder, DATA_FILE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(
    checkpoint: Any,
    make: Callable[[Path], None],
    file: str,
    form: Callable[[Canary], bytes],
    model: RecipeModel,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    make(folder)

    def read() -> None:
        state = checkpoint.read(folder, model)
        for shard in state.shards:
            for quantity in shard.quantities:
                shard.get(quantity)

    read()  # what is refused afterwards is the payload
    for content in (form(Canary(tmp_path / "canary")), nested(100_000).encode()):
        if file == DATA_FILE:
            all_at_the_start(folder, content)
        refused = check_refused(folder / file, read, content)
        # A whole zip file is looked into, and its pickle is what is wrong with it.
        data = file == DATA_FILE and content.startswith(b"PK")
        assert "(UnpicklingError)" in refused if data else file in refused or "distcp" in file
    assert not (tmp_path / "canary").exists()


def test_no_file_of_a_trainer_is_nested_without_end(model: RecipeModel, tmp_path: Path) -> None:
    trainer_folder(tmp_path)
    with pytest.raises(ValueError, match="nested"):  # which the command reports
        (tmp_path / "trainer_state.json").write_text(nested(100_000))
        TRAINER.read(tmp_path, model)
