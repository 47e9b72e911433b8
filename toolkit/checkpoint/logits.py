"""Checks that an exported model computes the same as the trained one."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from toolkit.checkpoint.export import check_complete, exported_dtype
from toolkit.checkpoint.export_adapters import base_weights, saved_lora
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState, SavedWeights
from toolkit.errors import RunFailed
from toolkit.models import huggingface as hf
from toolkit.models.adapters.huggingface import inject
from toolkit.models.adapters.lora import PEFT_WEIGHTS
from toolkit.models.adapters.weights import AdaptedWeights

SEQUENCES, LENGTH = 2, 32
"""Random tokens that both models read."""
TOLERANCE = 1e-4
"""Largest accepted difference, relative to the largest logit where that is above 1."""
_ROUNDED = 3e-2
"""Tolerance if the export's weights are rounded to 16 bits."""


@dataclass(frozen=True)
class Agreement:
    """What was found; `--json` prints these fields."""

    max_abs_difference: float
    bound: float

    def __str__(self) -> str:
        found = f"largest difference {self.max_abs_difference:.1e} (bound {self.bound:.1e})"
        return f"logits agree: {found}"


@torch.no_grad()
def compare(folder: Path, exported: Path) -> Agreement:
    """Logits of the checkpoint `folder`, in the model that trains, and of its export `exported`
    as transformers or PEFT loads it, on the same random tokens: in fp32 on the CPU.

    Raises RunFailed if they differ by more than rounding, or if adapters have no effect.
    """
    logging.disable_progress_bar()  # its own progress bars
    manifest, state = Manifest.read(folder), SavedState(folder)
    config = check_complete(state)
    length = min(LENGTH, getattr(config, "max_position_embeddings", LENGTH))
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (SEQUENCES, length), generator=random)
    lora = saved_lora(manifest, config)
    model = hf.empty_model(config, torch.device("cpu"))
    tolerance = TOLERANCE if exported_dtype(manifest) == torch.float32 else _ROUNDED
    if lora is None:
        hf.fill(model, SavedWeights(state, hf.parameter_shapes(config)))
    else:
        base = base_weights(manifest)
        inject(model, lora)
        hf.fill(model, AdaptedWeights(base, SavedWeights(state, lora.shapes)))
    expected = _logits(model, tokens)
    if lora is not None and (exported / PEFT_WEIGHTS).is_file():
        tolerance = TOLERANCE
        plain = hf.empty_model(config, torch.device("cpu"))
        hf.fill(plain, base)
        if _logits(plain, tokens).equal(expected):
            raise RunFailed(f"the adapters of {folder} have no effect on the base's logits")
        from peft import PeftModel  # takes seconds

        found = _logits(PeftModel.from_pretrained(plain, exported), tokens)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(
            exported, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )
        # The grouped matrix products that are the default need 16-byte strides on CPUs.
        loaded.config._experts_implementation = "eager"
        found = _logits(loaded, tokens)
    largest = expected.abs().max().item()
    difference = (found - expected).abs().max().item()
    bound = tolerance * max(1.0, largest)
    if not difference <= bound:
        raise RunFailed(
            f"{exported} is written, but its logits differ from those of {folder} by "
            f"{difference:.2e}; at most {bound:.2e} is rounding",
            fix="do not use it, and report the model's config.json",
        )
    return Agreement(difference, bound)


def _logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits in evaluation: fp32 [sequences, length, vocabulary]."""
    logits: torch.Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    return logits.float()
