"""Adapters initialised from a PEFT folder."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.adapters.lora import Lora
from toolkit.errors import DataError
from toolkit.models.families.tensors import Block
from toolkit.models.safetensors import SafetensorsFolder
from toolkit.system.untrusted import read_json

if TYPE_CHECKING:
    from torch import Tensor

_FIX = "name a folder that PEFT wrote"
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""PEFT's prefix for the wrapped model."""
_MERGE = (
    "merge it into its base with PEFT (`merge_and_unload()`, then `save_pretrained`), name the "
    "result in model.hub, and remove adapter.folder"
)
_DEFAULTS = {"r": 8, "lora_alpha": 8, "use_rslora": False, "bias": "none"}
"""PEFT's defaults for missing keys of its configuration."""
_WITHOUT_EFFECT = frozenset({
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "target_modules", "target_parameters", "exclude_modules", "lora_dropout",
    "fan_in_fan_out", "layers_pattern", "megatron_config", "megatron_core", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
    "ensure_weight_tying",
})  # fmt: skip
"""Keys that do not affect the function of the stored tensors, or only in combination with
another key, which is checked. The adapted modules follow from the tensors."""
_FIRST_VALUES = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that only affect the initial values. The others change the base
weights (pissa, olora, loftq, …), without which the adapters are wrong, or the training."""


class PeftWeights:
    """The tensors of a PEFT folder as a `WeightSource`.

    Raises DataError if a file is missing or damaged, or its adapters differ from the recipe's
    in tensors or function.
    """

    def __init__(self, folder: Path, lora: Lora, *, framework: str = "pt") -> None:
        """`framework`: of the values that it reads; "numpy" does not import torch."""
        self.folder = folder
        self.shapes = lora.shapes
        self._names = lora.peft_names
        self._stored = SafetensorsFolder(folder, PEFT_WEIGHTS, framework)
        if found := [*self._beyond_lora()]:
            said = f"adapter.folder: {folder} is more than plain LoRA: {'; '.join(found)}"
            raise DataError(said, fix=_MERGE)
        if found := [*self._differences(lora)]:
            said = f"adapter.folder: {folder} holds other adapters: {'; '.join(found)}"
            raise DataError(said, fix=self._fix(lora))

    def read(self, name: str, start: int, stop: int) -> "Tensor":
        """See `WeightSource.read`: in the folder's type."""
        values: Tensor = self._finite(name, self._part(name)[:])
        return values.reshape(-1)[start:stop]

    def read_block(self, block: Block) -> "Tensor":
        """See `WeightSource.read_block`: in the folder's type."""
        assert block.columns is not None, "a matrix"
        part = self._part(block.tensor)[slice(*block.rows), slice(*block.columns)]
        values: Tensor = self._finite(block.tensor, part)
        return values[:: block.steps[0], :: block.steps[1]]  # files are read without gaps

    def _part(self, name: str) -> Any:
        return self._stored.part(f"{PEFT_PREFIX}{self._names[name]}")

    def _finite(self, name: str, values: Any) -> Any:
        return self._stored.finite(f"{PEFT_PREFIX}{self._names[name]}", values)

    @cached_property
    def _config(self) -> dict[str, Any]:
        path = self.folder / PEFT_CONFIG
        try:
            config: object = read_json(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error}", fix=_FIX) from error
        if not isinstance(config, dict):
            raise DataError(f"{path} cannot be read: it is not a map", fix=_FIX)
        return config

    def _stated(self, key: str) -> Any:
        found = self._config.get(key)
        return _DEFAULTS.get(key) if found is None else found

    def _beyond_lora(self) -> Iterator[str]:
        """What a recipe cannot say."""
        for key, wanted in (("peft_type", "LORA"), ("bias", "none")):
            if (found := self._stated(key)) != wanted:
                yield f"{key} is {found!r}"
        if (first := self._config.get("init_lora_weights")) not in _FIRST_VALUES:
            yield f"init_lora_weights is {first!r}, which changes more than first values"
        known = {"peft_type", "init_lora_weights", *_DEFAULTS, *_WITHOUT_EFFECT}
        for key in sorted(self._config.keys() - known):
            if found := self._config[key]:
                yield f"{key} is {found!r}"

    def _differences(self, lora: Lora) -> Iterator[str]:
        """How its adapters differ from the recipe's."""
        section = lora.section
        ours = {"r": section.rank, "lora_alpha": section.alpha, "use_rslora": section.rslora}
        for key, wanted in ours.items():
            if (found := self._stated(key)) != wanted:
                yield f"{key} is {found!r}, the recipe's is {wanted!r}"
        own = {stored: name for name, stored in self._names.items()}
        stored = {name.removeprefix(PEFT_PREFIX) for name in self._stored.files}
        names = {own.get(name, name) for name in stored}
        if lacking := sorted(self.shapes.keys() - names):
            yield f"it lacks {lacking[0]}"
        if more := sorted(names - self.shapes.keys()):
            yield f"it has {more[0]}, the recipe's have not"
        for name in sorted(names & self.shapes.keys()):
            if (shape := tuple(self._part(name).get_shape())) != self.shapes[name]:
                yield f"{name} is {list(shape)}, not {list(self.shapes[name])}"
                return

    def _fix(self, lora: Lora) -> str:
        """The settings of the recipe that its adapters need."""
        section = lora.section
        settings = (
            ("rank", self._stated("r"), section.rank),
            ("alpha", self._stated("lora_alpha"), section.alpha),
            ("rslora", self._stated("use_rslora"), section.rslora),
        )
        changes = [f"adapter.{key} to {is_}" for key, is_, ours in settings if is_ != ours]
        modules = {
            *(name.partition(".lora_")[0].rpartition(".")[2] for name in self._stored.files),
            *(one.rpartition(".")[2] for one in self._config.get("target_parameters") or ()),
        } - {"experts", "base_layer"}  # PEFT's names of those of experts
        if modules != {one.name.rpartition(".")[2] for one in lora.projections}:
            changes.append(f"adapter.targets to [{', '.join(sorted(modules))}]")
        if not changes:
            return "name a folder with adapters of this model: these are of another one"
        return f"set {', '.join(changes)}"
