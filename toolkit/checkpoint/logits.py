"""Checks that an exported model computes the same as the trained one."""

from pathlib import Path

import torch
from transformers.utils import logging

from toolkit.adapters.huggingface import inject
from toolkit.adapters.imported import PEFT_WEIGHTS
from toolkit.adapters.weights import AdaptedWeights
from toolkit.checkpoint.export import check_complete, exported_dtype
from toolkit.checkpoint.export_adapters import base_weights, saved_lora
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState, SavedWeights
from toolkit.errors import RunFailed
from toolkit.models import huggingface as hf
from toolkit.models.agreement import (
    TOKENS,
    TOLERANCE,
    Agreement,
    huggingface_logits,
    same_tokens,
)

_ROUNDED = 3e-2
"""Tolerance if the export's weights are rounded to 16 bits."""


@torch.no_grad()
def compare(folder: Path, exported: Path) -> Agreement:
    """Logits of the checkpoint `folder`, in the model that trains, and of its export `exported`
    as transformers or PEFT loads it, on the same random tokens: in fp32 on the CPU.

    Raises RunFailed if they differ by more than rounding, or if adapters have no effect.
    """
    logging.disable_progress_bar()  # its own progress bars
    manifest, state = Manifest.read(folder), SavedState(folder)
    config = check_complete(state)
    length = min(TOKENS[1], getattr(config, "max_position_embeddings", TOKENS[1]))
    tokens = same_tokens(config.vocab_size, length)
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
        found = huggingface_logits(exported, tokens)
    result = Agreement.of(expected, found, tolerance)
    result.check(exported, folder)
    return result


def _logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits in evaluation: fp32 [sequences, length, vocabulary]."""
    logits: torch.Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    return logits.float()
