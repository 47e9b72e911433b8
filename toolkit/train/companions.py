"""The files of a Hugging Face folder except the weights: the trained model's config and
tokenizer. Every checkpoint holds them, so that it can be exported alone."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PretrainedConfig

from toolkit.checkpoint.export import COMPANIONS, DTYPES
from toolkit.data.build import TrainingData
from toolkit.models import huggingface as hf
from toolkit.recipe.schema import Recipe
from toolkit.run.directory import RunDirectory
from toolkit.train.exporting import add_turn_ends


def take_ends(config: PretrainedConfig, recipe: Recipe, data: TrainingData) -> None:
    """Give the config of a model that starts from no other one its tokenizer's ends."""
    if recipe.model.init != "pretrained":
        config.eos_token_id = data.tokenizer.eos_token_id
        config.bos_token_id = data.tokenizer.bos_token_id


def companion_files(
    recipe: Recipe, run: RunDirectory, config: PretrainedConfig, data: TrainingData
) -> dict[str, bytes]:
    """The companion files' contents, by path in a checkpoint."""
    dtype = DTYPES.get(recipe.training.precision, torch.float32)
    with TemporaryDirectory() as name:
        folder = Path(name)
        base = _folder_of_first_model(recipe, run)
        hf.save_companions(config, dtype, folder, base, recipe.model.config)
        _save_tokenizer(recipe, data, folder)
        add_turn_ends(recipe, data.tokenizer, folder)
        files = sorted(folder.iterdir())
        return {f"{COMPANIONS}/{file.name}": file.read_bytes() for file in files}


def _folder_of_first_model(recipe: Recipe, run: RunDirectory) -> Path | None:
    """The folder with the config of the model that training starts from, if there is one."""
    model = recipe.model
    if model.init == "pretrained":
        assert model.hub is not None, "checked at load"
        return hf.snapshot_folder(model.hub, model.revision)
    if model.checkpoint is None:
        return None
    # A resumed run may have outlived the checkpoint that it started from.
    own = sorted(run.checkpoints.glob(f"step-????????/{COMPANIONS}"))
    folders = Path(model.checkpoint) / COMPANIONS, *own
    return next((folder for folder in folders if folder.is_dir()), None)


def _save_tokenizer(recipe: Recipe, data: TrainingData, folder: Path) -> None:
    name, revision = recipe.data.tokenizer, recipe.data.tokenizer_revision
    local = Path(name).expanduser()
    if local.is_dir():
        hf.copy_tokenizer(local, folder)
    elif (name, revision) == (recipe.model.hub, recipe.model.revision):
        hf.copy_tokenizer(hf.snapshot_folder(name, revision), folder)
    else:
        data.tokenizer.save_pretrained(folder)
    if recipe.data.chat_template is not None:
        hf.write_chat_template(str(data.tokenizer.chat_template), folder)
