"""Upcycling: converts a dense model into a mixture of experts that are copies of its MLP.

Komatsuzaki et al., "Sparse Upcycling" (arXiv:2212.05055). The weights of the chosen experts add
up to 1, so before training the mixture computes the dense model's function, whichever experts
its router chooses.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import DataError
from toolkit.extras.convert.source import ConvertibleModel, companion_files, require_known
from toolkit.models.families import FAMILIES, settings_of
from toolkit.models.safetensors_folder import SafetensorsFolder
from toolkit.models.safetensors_stream import TensorToWrite, read_entries, write_model

EXPERTS_PER_TOKEN = 2
_MLP = re.compile(r"(.*layers\.(\d+)\.mlp)\.((gate|up|down)_proj\.weight)")


@dataclass(frozen=True)
class Mixture:
    """The mixture family of a dense family."""

    model_type: str
    architecture: str
    width: str
    """The config's key for the MLP size of one expert."""
    fixed: dict[str, object]


_QWEN3 = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
_MIXTRAL = Mixture("mixtral", "MixtralForCausalLM", "intermediate_size", {})
MIXTURES = {
    "llama": _MIXTRAL,
    "mistral": _MIXTRAL,
    "qwen3": Mixture("qwen3_moe", "Qwen3MoeForCausalLM", "moe_intermediate_size", _QWEN3),
}


class ToExperts:
    """The conversion of one Hugging Face folder into one of a mixture of `experts` experts.

    Routers are drawn from `seed`. Raises DataError if no mixture family supports the dense
    model's other settings.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, source: ConvertibleModel, experts: int, seed: int) -> None:
        self.source, self.experts, self.seed = source, experts, seed
        if source.is_megatron or source.family not in MIXTURES:
            found = "a Megatron checkpoint" if source.is_megatron else source.family
            allowed = ", ".join(MIXTURES)
            raise DataError(
                f"--to-experts needs a Hugging Face folder of {allowed}, not {found}"
            )
        self.mixture = MIXTURES[source.family]
        self.config = self._config()
        self.entries = [*self._entries()]
        self.nbytes = sum(entry.nbytes for entry in self.entries)

    def write(self, folder: Path, tick: Callable[[int], None]) -> None:
        """Write the empty folder; `tick` is called with the bytes of each piece."""
        write_model(folder, [entry.telling(tick) for entry in self.entries])
        for file in companion_files(self.source.folder):
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")

    def _config(self) -> dict[str, Any]:
        """The mixture's config, with every default of the dense family written out."""
        dense, keys = settings_of(self.source.config), FAMILIES[self.mixture.model_type].keys
        for name, value in self.source.config.items():
            neutral = value in (None, dense.family.keys[dense.family.name_of(name)].default)
            if name == "layer_types":
                neutral = {*(value or ())} <= {"full_attention"}
            if (name not in keys and not neutral) or (name == "use_sliding_window" and value):
                raise DataError(
                    f"{self.source.config_file}: {self.mixture.model_type} cannot have "
                    f"{name}: {value}"
                )
        shared = {name: dense[name] for name in dense.family.keys if name in keys}
        config = {name: value for name, value in shared.items() if value is not None}
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if "rope_theta" not in rope:
            config.setdefault("rope_theta", 10000.0)
        config |= {
            "architectures": [self.mixture.architecture],
            "model_type": self.mixture.model_type,
            "num_key_value_heads": dense["num_key_value_heads"] or dense["num_attention_heads"],
            self.mixture.width: dense["intermediate_size"],
            FAMILIES[self.mixture.model_type].name_of("num_local_experts"): self.experts,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            **self.mixture.fixed,
        }
        require_known(self.source.config_file, config)
        return config

    def _entries(self) -> Iterator[TensorToWrite]:
        """The dense model's tensors, each of its MLPs' once per expert, and the routers."""
        published = FAMILIES[self.mixture.model_type].published_name
        stored = SafetensorsFolder(self.source.folder)
        for entry in read_entries(stored, stored.files):
            match = _MLP.fullmatch(entry.name)
            if match is None:
                yield entry
                continue
            mlp, layer, part, kind = match.groups()
            for expert in range(self.experts):
                yield replace(entry, name=published(f"{mlp}.experts.{expert}.{part}"))
            if kind == "gate":
                shape = self.experts, entry.shape[1]
                draw = partial(self._router, int(layer), shape, entry.dtype)
                yield TensorToWrite(published(f"{mlp}.gate.weight"), entry.dtype, shape, draw)

    def _router(self, layer: int, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
        """What transformers' initialisation draws, from the seed and the layer's number."""
        generator = torch.Generator().manual_seed((self.seed << 16) + layer)
        std = float(settings_of(self.config)["initializer_range"])
        return [(torch.randn(shape, generator=generator) * std).to(dtype)]
