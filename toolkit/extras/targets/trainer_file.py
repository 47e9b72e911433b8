"""`TrainingArguments` of a run, as the JSON that transformers' scripts read, with the names of
run_clm.py for the model and the data."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.extras.targets.finetuning import FinetuningTarget
from toolkit.extras.targets.trainer import TrainerTarget
from toolkit.extras.targets.values import written_rows
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import HfSource, Recipe
from toolkit.targets.base import Target

_KEYS = {
    "tokenizer_name": "data.tokenizer",
    "block_size": "training.sequence_length",
    "run_name": "name",
}


class TrainerFile(TrainerTarget, FinetuningTarget):
    """The file that `TrainerTarget` reads."""

    elsewhere = "TrainingArguments"
    expressed = frozenset(("model.resize_embeddings",))

    def score(self, values: Mapping[str, Any]) -> int:
        """See `Target`: the other tools' files have the same names, and more."""
        return Target.score(self, values)

    def write(self, recipe: Recipe, plan: Plan) -> tuple[str, Sequence[str]]:
        """See `Target`."""
        self._refuse(recipe, plan, {})
        values, notes = self.file(recipe, plan)
        return json.dumps(values, indent=2) + "\n", notes

    def file(self, recipe: Recipe, plan: Plan) -> tuple[dict[str, object], Sequence[str]]:
        """See `FinetuningTarget`."""
        for key in ("adapter", "dpo", "orpo"):
            if getattr(recipe, key) is not None or recipe.training.objective == key:
                raise self.refuse(recipe, f"the section {key}", f"{key}=null")
        if plan.layout.cp > 1:
            raise self.refuse(recipe, "context parallel", "parallel.context=1")
        found = dict(written_rows(_KEYS, recipe, plan)) | self.trainer(recipe, plan)
        found["config_name" if recipe.model.init == "random" else "model_name_or_path"] = (
            recipe.model.hub
        )
        if "warmup_ratio" in found:
            found["warmup_steps"] = found.pop("warmup_ratio")  # which takes a share as well
        if least := recipe.schedule.min_learning_rate:
            found["lr_scheduler_type"] = "cosine_with_min_lr"
            found["lr_scheduler_kwargs"] = {"min_lr": least}
        tools = ("wandb", "tensorboard", "mlflow", "trackio")
        found["report_to"] = [name for name in tools if getattr(recipe.logging, name)]
        source = recipe.data.train
        if not isinstance(source, HfSource):
            return found, ["the data of data.train is for your script to read"]
        found |= {"dataset_name": source.path}
        return found | ({"dataset_config_name": source.name} if source.name else {}), ()


TARGET = TrainerFile()
