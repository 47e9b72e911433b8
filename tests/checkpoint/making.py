"""Checkpoints as a run would have left them, made in this process."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from torch import Tensor

from tests.checkpoint.conftest import MANIFEST
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saver import Saver
from toolkit.checkpoint.shards import QUANTITIES, StateShard, cut, parameter_blocks
from toolkit.checkpoint.store import CheckpointStore, folder_name
from toolkit.data.tokenizers import byte_tokenizer
from toolkit.intake.load import load_recipe
from toolkit.models import huggingface as hf
from toolkit.recipe.schema import ModelSection
from toolkit.run import jsonl
from toolkit.run.assignment import decide

RECIPE = """\
name: small
model:
  config: {model_type: llama, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
    num_key_value_heads: 2, intermediate_size: 128, vocab_size: 320, tie_word_embeddings: true}
data: {train: {kind: text, files: ["*.txt"]}, tokenizer: bytes}
training: {steps: 20, sequence_length: 16, global_batch_size: 4, precision: fp32}
optimizer: {learning_rate: 1.0e-3}
parallel: {engine: ddp, model: hf}
"""
"""Its model is `MODEL`."""
MODEL = ModelSection(config=yaml.safe_load(RECIPE)["model"]["config"])


def write_recipe(folder: Path) -> Path:
    """A recipe file that `saved_run` trains."""
    path = folder / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def state_of(model: torch.nn.Module) -> Iterator[StateShard]:
    """Weights and other numbers as moments; every tensor in two runs, cut within a row."""
    for name, value in model.named_parameters():
        flat = value.detach().reshape(-1)
        blocks, half = parameter_blocks(name, value.shape), value.numel() // 2 + 3
        values: dict[str, Tensor] = {
            quantity: flat * (number + 1) for number, quantity in enumerate(QUANTITIES)
        }
        for start, stop in ((0, half), (half, value.numel())):
            parts = {quantity: whole[start:stop] for quantity, whole in values.items()}
            yield StateShard(cut(blocks, start, stop), parts, saved_here=True)


def save(folder: Path, manifest: Manifest, state: Iterable[StateShard] | None = None) -> Path:
    """A checkpoint of `MODEL` in the checkpoints folder `folder`."""
    config = hf.build_config(MODEL)
    model = hf.empty_model(config, torch.device("cpu"))
    hf.fill(model, hf.weight_source(MODEL, config, seed=manifest.step))
    made = folder.parent / "companions"
    hf.save_companions(config, torch.float32, made)
    byte_tokenizer().save_pretrained(made)
    companions = {f"hf/{path.name}": path.read_bytes() for path in made.iterdir()}
    saver = Saver(CheckpointStore(folder, keep=9), asynchronous=False)
    saver.save(manifest, state_of(model) if state is None else state, companions)
    saved = saver.finished(wait=True)
    saver.close()
    assert saved is not None and saved.problem is None
    return folder / folder_name(manifest.step)


def saved_run(folder: Path, *steps: int) -> Path:
    """A run directory of `write_recipe`'s recipe with checkpoints of some steps."""
    assignment = decide(load_recipe(write_recipe(folder)), folder / "run")
    for step in steps:
        manifest = replace(
            MANIFEST,
            step=step,
            consumed_samples=4 * step,
            engine=assignment.plan.engine,
            model=assignment.plan.model,
            layout=assignment.plan.layout,
            recipe=jsonl.plain(assignment.recipe.model_dump(mode="json")),
            versions={"dmt": "0.1.0", "python": "3.11", "packages": {"torch": "2.13.0"}},
        )
        save(folder / "run" / "checkpoints", manifest)
    return folder / "run"
