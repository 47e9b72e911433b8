"""Hugging Face `TrainingArguments`, as `to_json_string` writes them or a script reads them; and
names of run_clm.py for the model and the data."""

from collections.abc import Mapping
from typing import Any, ClassVar

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.foreign import trainer
from toolkit.foreign.base import (
    ACCUMULATION,
    ForeignSetting,
    Result,
    Row,
    Settings,
    Stated,
    Target,
    Unknown,
    changes,
    unknown,
)
from toolkit.foreign.finetuning import FinetuningTarget
from toolkit.foreign.options import read_options, together
from toolkit.foreign.training_arguments import KEYS
from toolkit.foreign.values import value_in
from toolkit.intake.foreign import foreign
from toolkit.recipe.schema import Recipe

_RENAMED = {"evaluation_strategy": "eval_strategy"}
_SCHEDULE = trainer.SCHEDULE_OPTIONS
_PAIRS = {
    "beta": "dpo.beta",
    "loss_type": "dpo.loss",
    "label_smoothing": "dpo.label_smoothing",
}
_LOSSES = ("sigmoid", "ipo", "hinge")


def _of_pairs(setting: ForeignSetting, settings: Settings) -> list[Result]:
    """A setting of TRL's DPOConfig, of whose names only the losses tell that it is one."""
    loss = settings["loss_type"].value if "loss_type" in settings else None
    if (loss[0] if isinstance(loss, list) and len(loss) == 1 else loss) not in _LOSSES:
        return [changes("write training.objective, and its section")]
    value = setting.value[0] if isinstance(setting.value, list) else setting.value
    found: list[Result] = [Stated(_PAIRS[setting.name], value, setting)]
    if setting.name == "loss_type":
        found.append(Stated("training.objective", "dpo", setting, certain=False))
    return found


_ROWS: Mapping[str, Row] = {
    **read_options("trainer", __file__).rows,
    **KEYS,
    **trainer.DEPENDENT,
    **{f"lr_scheduler_kwargs.{option}": ours for option, ours in _SCHEDULE.items()},
    "config_name": lambda setting, _: [
        Stated("model.hub", setting.value, setting),
        Stated("model.init", "random", setting),
    ],
    "tokenizer_name": "data.tokenizer",
    "dataset_name": "data.train.path",
    "dataset_config_name": "data.train.name",
    **dict.fromkeys(_PAIRS, _of_pairs),
    **dict.fromkeys(("block_size", "model_max_length"), "training.sequence_length"),
    **dict.fromkeys(trainer.BLOCKS, together),
}


class TrainerTarget(FinetuningTarget):
    """`toolkit.accelerate.training_arguments` makes the object."""

    kind = "TrainingArguments"
    form = "TrainingArguments (JSON or YAML)"
    tool = "the Trainer"
    names = FinetuningTarget.known
    knows_all = True
    defaults: ClassVar[Mapping[str, object]] = {
        "training.micro_batch_size": 8,
        ACCUMULATION: 1,
        "training.epochs": 3.0,
        "training.precision": "fp32",
        "training.seed": 42,
        "optimizer.learning_rate": 5e-5,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.weight_decay": 0.0,
        "schedule.name": "linear",
        "model.init": "pretrained",
        "parallel.tensor": 1,
        "parallel.pipeline": 1,
        "parallel.context": 1,
        "checkpoint.every_steps": 500,
        "logging.every_steps": 500,
    }

    def score(self, values: Mapping[str, Any]) -> int:
        """See `Target`: the other tools' files have the same names, and more."""
        return Target.score(self, values)

    def settings(self, file: JsonFile, recipe: Recipe | None) -> dict[str, ForeignSetting]:
        """See `TableTarget`: transformers writes every default out."""
        settings = {
            _RENAMED.get(name, name): setting
            for name, setting in super().settings(file, recipe).items()
            if setting.value not in ([], {}, "")
        }
        name = "lr_scheduler_kwargs"
        if isinstance(options := value_in(settings, name), dict):
            for option in _SCHEDULE.keys() & options.keys():
                key = f"{name}.{option}"
                settings[key] = ForeignSetting(key, options[option], file.place(key))
            if options.keys() <= _SCHEDULE.keys():
                del settings[name]
        return settings

    def table(self, file: JsonFile, settings: Settings) -> Mapping[str, Row]:
        """See `TableTarget`."""
        return _ROWS

    def judge(self, setting: ForeignSetting) -> Unknown | None:
        """See `TableTarget`."""
        is_known = setting.name in self.known or foreign(setting.name)
        return None if is_known else unknown(setting, self.known)


TARGET = TrainerTarget()
