"""The files of a Hugging Face folder: those that every checkpoint holds besides the weights, so
that it can be exported alone, and the export of a run."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from toolkit.checkpoint.export import COMPANIONS, DTYPES, export, exported_bytes
from toolkit.checkpoint.store import CheckpointStore
from toolkit.data.build import TrainingData
from toolkit.data.chat.template import ChatTemplate
from toolkit.models import huggingface as hf
from toolkit.models.huggingface import add_end_tokens
from toolkit.recipe.schema import ChatRowsSource, Recipe
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.run.model_card import write_card
from toolkit.system.failpoints import failpoint
from toolkit.text.terminal import tell
from toolkit.train.watchdog import Marks


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


def export_last(run: RunDirectory, step: int, marks: Marks) -> None:
    """Write RUN/export from the checkpoint of `step`, unless it already exists.

    Replaces the export of another step. Raises as `export` does.
    """
    written = [e.get("step") for e in jsonl.read(run.events) if e.get("kind") == "export"]
    if run.export.is_dir() and written[-1:] == [step]:
        return
    checkpoint = CheckpointStore(run.checkpoints, keep=1).of_step(step)
    tick = marks.begin("exporting", exported_bytes(checkpoint))
    failpoint("export")
    shutil.rmtree(run.export, ignore_errors=True)
    export(checkpoint, run.export, tick)
    write_card(run.export, checkpoint)
    EventLog(run.events).write("export", step=step)


def add_turn_ends(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Let the model in `folder` also stop where the chats that it is trained on end a turn.

    Without this, one with another end token would write until its limit.
    """
    template = tokenizer.chat_template
    chats = any(isinstance(source, ChatRowsSource) for source in recipe.data.sources)
    if not chats or template is None:
        return
    added = add_end_tokens(folder, ChatTemplate(template, tokenizer).turn_ends())
    if added:
        names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(added)))
        where = "in its generation_config.json and config.json"
        if recipe.adapter is not None:
            where = "in an export --merged; a PEFT folder has no end tokens: state it there"
        tell(f"export: generation also stops at {names}, which ends a chat's turn ({where})")
