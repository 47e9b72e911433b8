"""The export of a run: written once from its last checkpoint, again only if it is lost."""

import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from toolkit.checkpoint.export import export, exported_bytes
from toolkit.checkpoint.store import CheckpointStore
from toolkit.data.chat.template import ChatTemplate
from toolkit.models.huggingface import add_end_tokens
from toolkit.recipe.schema import ChatRowsSource, Recipe
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.run.model_card import write_card
from toolkit.system.failpoints import failpoint
from toolkit.text.terminal import tell
from toolkit.train.watchdog import Marks


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
