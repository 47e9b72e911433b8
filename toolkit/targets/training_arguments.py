"""Hugging Face `TrainingArguments`, as `to_json_string` writes them or a script reads them."""

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.engines.deepspeed.json_file import JsonFile, read_json
from toolkit.recipe.foreign import foreign
from toolkit.targets import accelerate, deepspeed_json
from toolkit.targets.accelerate import AccelerateSetting
from toolkit.targets.known_keys import (
    OLD_TRAINING_ARGUMENTS,
    TRAINER_FSDP,
    TRAINING_ARGUMENTS,
)
from toolkit.targets.source import (
    ACCUMULATION,
    Collected,
    OneOf,
    SettingSource,
    Stated,
    Unknown,
    global_batch,
    number,
    precisions,
    relative_to_file,
    shown,
    translated,
    unknown,
)

KIND = "TrainingArguments"

_SAME: Mapping[str, str] = {
    "per_device_train_batch_size": "training.micro_batch_size",
    "gradient_accumulation_steps": ACCUMULATION,
    "learning_rate": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.betas[0]",
    "adam_beta2": "optimizer.betas[1]",
    "adam_epsilon": "optimizer.eps",
    "optim": "optimizer.name",
    "lr_scheduler_type": "schedule.name",
    "seed": "training.seed",
    "data_seed": "training.seed",
    "save_total_limit": "checkpoint.keep",
    "run_name": "name",
    "model_name_or_path": "model.hub",
    "max_seq_length": "training.sequence_length",
    "max_length": "training.sequence_length",
}
"""Settings that a recipe has with the same meaning; None and nothing state nothing."""

_PRECISIONS: tuple[str, ...] = ("bf16", "fp16")

_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_FSDP_NAMES = {"cpu_offload": "fsdp_offload_params"}
_FSDP_1_NAMES = {"reshard_after_forward": "fsdp_sharding_strategy"}
"""Where Accelerate's names are not transformers' with `fsdp_` before them."""

_INTERVALS = {
    "logging": ("logging_strategy", "logging_steps", "logging.every_steps"),
    "eval": ("eval_strategy", "eval_steps", "evaluation.every_steps"),
    "save": ("save_strategy", "save_steps", "checkpoint.every_steps"),
}


def read(file: JsonFile, name: str) -> SettingSource:
    """What the arguments state."""
    found = _Reader(file).collect()
    return found.source(
        name,
        KIND,
        "recipe",
        "DMT does not read this file: the recipe takes precedence",
        "HF Trainer reads only this file: there it takes precedence",
    )


class _Reader:
    """Goes through the arguments once; `left` holds what has not been read yet."""

    def __init__(self, file: JsonFile) -> None:
        self.file = file
        # What is empty states nothing: transformers writes every default out.
        self.left = {k: v for k, v in file.values.items() if v not in (None, [], {}, "")}
        self.found = Collected()

    def collect(self) -> Collected:
        """Everything that the arguments state."""
        self.found.stated += self._same()
        self.found.stated += global_batch(self.found.stated)
        self.found.stated += self._precision()
        self.found.stated += self._length()
        self.found.stated += self._schedule()
        self.found.stated += self._intervals()
        self.found.stated += self._switches()
        self._engine()
        known = TRAINING_ARGUMENTS | OLD_TRAINING_ARGUMENTS
        for key in self.left:
            if key in known or foreign(key):
                self.found.only_there.append(key)
            else:
                self.found.unknown.append(unknown(key, self.file.place(key), known))
        return self.found

    def _take(self, key: str) -> Any:
        return self.left.pop(key, None)

    def _number(self, key: str) -> float | None:
        """Take a number; None where there is none, or something else, which is reported."""
        value = self._take(key)
        found = number(value)
        if value is not None and found is None:
            self.found.unknown.append(Unknown(key, self.file.place(key), "not a number"))
        return found

    def _stated(self, target: str, value: object, key: str, **more: Any) -> Stated:
        """One setting; it is shown as the file has it."""
        written = shown(self.file.values[key])
        return Stated(target, value, key, written, self.file.place(key), **more)

    def _same(self) -> Iterator[Stated]:
        for key, target in _SAME.items():
            if (value := self._take(key)) is not None:
                if target in ("optimizer.name", "schedule.name"):
                    value = translated(target, value)
                yield self._stated(target, value, key)
        if (value := self._take("max_grad_norm")) is not None:
            yield self._stated("optimizer.clip_grad_norm", value or None, "max_grad_norm")

    def _precision(self) -> Iterator[Stated]:
        stated = {key: self._take(key) for key in _PRECISIONS if key in self.left}
        for key, meant in precisions(stated).items():
            yield self._stated("training.precision", meant, key)
        if self.left.get("tf32") is True and True not in stated.values():
            # Products of fp32 matrices in TF32 have ten bits.
            self._take("tf32")
            yield self._stated("training.precision", "tf32", "tf32")

    def _length(self) -> Iterator[Stated]:
        steps, epochs = self._number("max_steps"), self._number("num_train_epochs")
        if steps is not None and steps > 0:
            yield self._stated("training.steps", steps, "max_steps")
        elif epochs is not None:
            advice = "the recipe gives the length in steps or tokens: compare what the runs did"
            yield self._stated("training.epochs", epochs, "num_train_epochs", advice=advice)

    def _schedule(self) -> Iterator[Stated]:
        for key in ("warmup_steps", "warmup_ratio"):
            value = self._number(key)
            unused = "warmup_ratio" if key == "warmup_steps" else key
            if value is None or (not value and (key == unused or self.left.get(unused))):
                continue
            if 0 < value < 1:  # a share of all steps; warmup_steps takes one, too
                steps = number(self.file.values.get("max_steps")) or 0
                known = steps > 0
                count = -(-steps * value // 1) if known else value
                advice = "" if known else "a share of steps that only the run knows"
                yield self._stated(
                    "schedule.warmup_steps", int(count), key, certain=known, advice=advice
                )
            else:
                yield self._stated("schedule.warmup_steps", int(value), key)
        options = self.file.values.get("lr_scheduler_kwargs")
        if isinstance(options, dict) and "min_lr" in options:
            self._take("lr_scheduler_kwargs")
            at = ("lr_scheduler_kwargs.min_lr", shown(options["min_lr"]))
            place = self.file.place("lr_scheduler_kwargs.min_lr")
            yield Stated("schedule.min_learning_rate", options["min_lr"], *at, place)

    def _intervals(self) -> Iterator[Stated]:
        for strategy, every, target in _INTERVALS.values():
            kind, steps = self._take(strategy), self._number(every)
            if kind == "steps" or (kind is None and steps is not None):
                if steps is not None and steps >= 1:
                    yield self._stated(target, int(steps), every)
            elif kind == "no" and target != "logging.every_steps":
                yield self._stated(target, None, strategy)
            elif kind is not None:
                self.found.only_there.append(strategy)

    def _switches(self) -> Iterator[Stated]:
        for key in ("gradient_checkpointing", "activation_checkpointing"):
            if (value := self._take(key)) is not None:
                # `selective` has no name there: a plain "off" does not exclude it.
                meant: object = "full" if value else OneOf(("none", "selective"))
                yield self._stated("parallel.recompute", meant, key)
        if self._take("use_cpu"):
            yield self._stated("cluster.gpu", "cpu", "use_cpu")
        if reports := self._take("report_to"):
            named = reports if isinstance(reports, list) else [reports]
            for tool, target in (
                ("wandb", "logging.wandb"),
                ("tensorboard", "logging.tensorboard"),
                ("mlflow", "logging.mlflow"),
                ("trackio", "logging.trackio"),
            ):
                if tool in named or "all" in named:
                    yield self._stated(target, True, "report_to")

    def _engine(self) -> None:
        """DeepSpeed's config, in the file or next to it, or FSDP."""
        config = self._take("deepspeed")
        if config is not None:
            engine = accelerate.ENGINES["DEEPSPEED"]
            self.found.stated.append(self._stated("parallel.engine", engine, "deepspeed"))
            self.found.add(deepspeed_json.collect(*self._block("deepspeed", config)))
        switch, config = self._take("fsdp"), self._take("fsdp_config")
        if switch and switch != "false":
            self.found.add(self._fsdp(switch, *self._block("fsdp_config", config or {})))
        elif config:
            self.found.only_there.append("fsdp_config (not in effect)")

    def _block(self, key: str, config: object) -> tuple[JsonFile, str]:
        """Settings in this file, or in one that it names, and what to put before their names.

        Raises RecipeError when the file that is named cannot be read.
        """
        if not isinstance(config, dict):
            return read_json(relative_to_file(str(config), self.file.path), f"{key} file"), ""
        start = f"{key}."
        lines = {
            name.removeprefix(start): line
            for name, line in self.file.lines.items()
            if name.startswith(start)
        }
        return JsonFile(self.file.path, config, lines), start

    def _fsdp(self, switch: object, file: JsonFile, prefix: str) -> Collected:
        """FSDP's settings by Accelerate's names, as transformers passes them on."""
        found = Collected()
        stated = {}
        for key, value in file.values.items():
            name = key.removeprefix("fsdp_")
            if name not in TRAINER_FSDP:
                found.unknown.append(unknown(prefix + key, file.place(key), TRAINER_FSDP))
            elif value is not None:
                stated[name] = AccelerateSetting(value, prefix + key, file.place(key))
        second = "version" not in stated or str(stated["version"].value) == "2"
        at = ("fsdp", self.file.place("fsdp"), shown(self.file.values["fsdp"]))
        meant = {
            key: AccelerateSetting(value, *at) for key, value in _fsdp_words(switch, second)
        }
        names = _FSDP_NAMES if second else {**_FSDP_NAMES, **_FSDP_1_NAMES}
        settings = {names.get(key, f"fsdp_{key}"): one for key, one in (meant | stated).items()}
        found.add(accelerate.collect(settings, file.path))
        return found


def _fsdp_words(switch: object, second: bool) -> Iterator[tuple[str, object]]:
    """What `fsdp` itself says: true, or the words that it had before transformers 5."""
    words = switch.split() if isinstance(switch, str) else switch
    words = words if isinstance(words, list) else []
    strategy = next((word for word in words if word in _STRATEGIES), "full_shard")
    yield "version", 2
    yield "reshard_after_forward", strategy == "full_shard" if second else strategy
    if "offload" in words:
        yield "cpu_offload", True
