"""Does an exported model compute what was trained?"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from toolkit.adapters.huggingface import inject
from toolkit.adapters.imported import PEFT_WEIGHTS
from toolkit.adapters.weights import AdaptedWeights
from toolkit.checkpoint.adapters import base_weights, saved_lora
from toolkit.checkpoint.export import check_complete, exported_dtype
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState, SavedWeights
from toolkit.errors import RunFailed
from toolkit.models import huggingface as hf
from toolkit.models.convert.verify import TOKENS, TOLERANCE, same_tokens
from toolkit.models.weights import WeightSource

_ROUNDED = 3e-2
"""Accepted instead of TOLERANCE where the export's weights are rounded to 16 bits."""


@dataclass(frozen=True)
class Agreement:
    """Logits of an export next to those of its checkpoint."""

    max_abs_difference: float
    largest_logit: float
    bound: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@torch.no_grad()
def compare(folder: Path, exported: Path) -> Agreement:
    """Logits of the checkpoint `folder`, in the model that trains, and of its export `exported`
    as transformers or PEFT load it: in fp32, on the CPU, on the same random tokens.

    Raises RunFailed where they differ by more than rounding.
    """
    logging.disable_progress_bar()  # its own bars, of files that are read
    manifest, state = Manifest.read(folder), SavedState(folder)
    config = check_complete(state)
    tokens = same_tokens(config.vocab_size, TOKENS[1])
    trained: WeightSource = SavedWeights(state, hf.parameter_shapes(config))
    lora = saved_lora(manifest, config)
    model = hf.empty_model(config, torch.device("cpu"))
    if lora is not None:
        base = base_weights(manifest)
        trained = AdaptedWeights(base, SavedWeights(state, lora.shapes))
        inject(model, lora)
    hf.fill(model, trained)
    expected = _logits(model, tokens)
    bound = TOLERANCE if exported_dtype(manifest) == torch.float32 else _ROUNDED
    if (exported / PEFT_WEIGHTS).is_file():
        assert lora is not None
        bound = TOLERANCE
        plain = hf.empty_model(config, torch.device("cpu"))
        hf.fill(plain, base)
        found = _logits(PeftModel.from_pretrained(plain, exported), tokens)
    else:
        found = _logits(_loaded(exported, config), tokens)
    largest = expected.abs().max().item()
    difference = (found - expected).abs().max().item()
    result = Agreement(difference, largest, bound * max(1.0, largest))
    if not result.max_abs_difference <= result.bound:
        raise RunFailed(
            f"{exported} is written, but its logits differ from those of {folder} by "
            f"{difference:.2e}; at most {result.bound:.2e} is rounding",
            fix="do not use it, and report the model's config.json",
        )
    return result


def _loaded(folder: Path, config: PretrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    model.config._experts_implementation = config._experts_implementation
    return model


def _logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits in evaluation: fp32 [sequences, length, vocabulary]."""
    logits: torch.Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    return logits.float()
