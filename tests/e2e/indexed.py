"""Runs on indexed data with a model, for tests that repeat them in transformers alone."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tests.e2e.hooks import hooked
from tests.e2e.product import Ended, dmt, records, run, settings
from toolkit.data.indexed import write_indexed


@dataclass(frozen=True)
class Case:
    """A folder with data, model and recipe."""

    folder: Path
    streams: dict[str, np.ndarray]
    ends: dict[str, np.ndarray]

    def launch(self, name: str, changes: dict[str, object], code: int | None = 0) -> Ended:
        argv = dmt("launch", "recipe.yaml", "--run-dir", name, *settings(changes))
        return run(argv, self.folder, hooked("logged_samples"), code=code)

    def batch(self, numbers: list[int], length: int, name: str) -> tuple[torch.Tensor, ...]:
        """Inputs and labels of the samples with these numbers, cut out of the documents."""
        places = np.array(numbers)[:, None] * length + np.arange(length)
        stream, last = self.streams[name], self.ends[name]
        labels = np.where(np.isin(places, last), -100, stream[places + 1])
        return torch.from_numpy(stream[places]), torch.from_numpy(labels)

    def in_torch(self, lr: float, **more: float) -> tuple[PreTrainedModel, torch.optim.AdamW]:
        """The model as transformers loads it, and torch's AdamW as the recipes set it: no
        weight decay on vectors."""
        model = AutoModelForCausalLM.from_pretrained(self.folder / "model", dtype=torch.float32)
        decayed = [one for one in model.parameters() if one.ndim > 1]
        others = [one for one in model.parameters() if one.ndim == 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(
            groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, **more
        )
        return model, optimizer


def sample_numbers(run_dir: Path) -> dict[int, list[int]]:
    """The samples of each step of a run in one process, as hooks.py logs them."""
    lines = records(run_dir / "samples" / "rank-0.jsonl")
    return {line["step"]: line["samples"] for line in lines}


def written(folder: Path, recipe: str) -> Case:
    """A folder with this recipe, indexed data and a model."""
    (folder / "recipe.yaml").write_text(recipe)
    chance = np.random.default_rng(3)
    streams, ends = {}, {}
    for name, count in {"train": 60, "validation": 9}.items():
        sizes = chance.integers(5, 90, count)
        streams[name] = chance.integers(0, 256, sizes.sum())
        ends[name] = np.cumsum(sizes) - 1
        documents = np.split(streams[name], ends[name] + 1)[:-1]
        write_indexed(folder / name, np.uint16, documents)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return Case(folder, streams, ends)
