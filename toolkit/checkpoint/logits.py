"""Checks that an exported model computes the same as the trained one."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from transformers.utils import logging

from toolkit.adapters.huggingface import inject
from toolkit.adapters.imported import PEFT_WEIGHTS
from toolkit.adapters.weights import AdaptedWeights
from toolkit.checkpoint.export import check_complete, exported_dtype
from toolkit.checkpoint.export_adapters import base_weights, saved_lora
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState, SavedWeights
from toolkit.errors import BackendUnavailable, RunFailed
from toolkit.models import huggingface as hf
from toolkit.models.agreement import (
    TOKENS,
    TOLERANCE,
    Agreement,
    huggingface_logits,
    same_tokens,
)
from toolkit.system.install import source

Loader: TypeAlias = Literal["transformers", "vllm"]
"""What loads an export: transformers also stands for PEFT."""

_ROUNDED = 3e-2
"""Tolerance if the export's weights are rounded to 16 bits."""
_OTHER_KERNELS = 1e-3
"""Smallest tolerance for a program with attention kernels of its own, on any device."""
_LOG_PROBS = 20
"""Per token: what vLLM returns unless it is started with a higher limit."""


def require(loader: Loader) -> None:
    """Raise BackendUnavailable unless `loader` is installed."""
    if loader == "vllm" and find_spec("vllm") is None:
        raise BackendUnavailable(
            "--compare-logits vllm: vLLM is not installed",
            fix=f"pip install {source()} vllm, or --compare-logits transformers",
        )


@torch.no_grad()
def compare(folder: Path, exported: Path, loader: Loader) -> Agreement:
    """Logits of the checkpoint `folder`, in the model that trains, and of its export `exported`
    as `loader` loads it, on the same random tokens: in fp32 on the CPU, vLLM on its own device.

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
    if loader == "vllm":
        expected, found = _vllm_log_probs(exported, tokens, expected.log_softmax(-1))
        tolerance = max(tolerance, _OTHER_KERNELS)
    elif lora is not None and (exported / PEFT_WEIGHTS).is_file():
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


def _vllm_log_probs(
    exported: Path, tokens: torch.Tensor, expected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `expected` [sequences, length, vocabulary] and vLLM have for the most likely tokens
    at each position, and for the one that follows."""
    # In this process: an engine process of its own could outlive it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm  # type: ignore[import-not-found]

    model = vllm.LLM(
        model=str(exported),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=tokens.shape[1] + 1,
        enforce_eager=True,
    )
    sampling = vllm.SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=_LOG_PROBS, detokenize=False
    )
    prompts = [{"prompt_token_ids": row} for row in tokens.tolist()]
    log_probs = {
        (sequence, position - 1, token): entry.logprob
        for sequence, output in enumerate(model.generate(prompts, sampling, use_tqdm=False))
        for position, entries in enumerate(output.prompt_logprobs)
        if position > 0  # no token precedes the first
        for token, entry in entries.items()
    }
    index = torch.tensor([*log_probs]).unbind(1)
    return expected[index], torch.tensor([*log_probs.values()])
