"""`kernels.loss: chunked`: the numbers of whole logits, in less memory."""

import resource

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from tests.engines.small import batch, small_model
from tests.forked import run_ranks
from toolkit import layout
from toolkit.batch import MicroBatch
from toolkit.errors import PlanError
from toolkit.layout import LossKernel
from toolkit.models import huggingface as hf

FAMILIES = "llama", "gemma2", "granite", "gpt2", "mixtral"
"""Logits that are capped, divided, of a head that is the embedding, behind experts."""


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    """Log-probabilities and gradients against cross entropy of whole logits."""
    model, tokens = small_model(family, tie_word_embeddings=family != "mixtral"), batch(3, 22)
    logits = model(tokens.input_ids).logits
    losses = cross_entropy(logits.flatten(0, 1), tokens.labels.flatten(), reduction="none")
    weights = torch.rand(losses.shape, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad((losses * weights).sum(), list(model.parameters()))
    hf.chunk_loss(model, "chunked")
    found = hf.log_probs(model, tokens)
    torch.testing.assert_close(-found.flatten(), losses, rtol=1e-6, atol=1e-6)
    torch.autograd.backward(-(found.flatten() * weights).sum())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)


def test_a_model_that_always_makes_all_logits() -> None:
    config = AutoConfig.for_model("xlstm", vocab_size=97, hidden_size=32, num_heads=2)
    with pytest.raises(PlanError, match="xLSTMForCausalLM makes all logits at once"):
        hf.chunk_loss(hf.meta_model(config), "chunked")


def peak_bytes(kernel: LossKernel) -> int:
    """Worker: what resident memory grows by in a forward and a backward pass."""
    layout._CHUNK_LOGITS = 2**23  # of 2**27: as many chunks as 8,192 tokens of 128k have
    config = AutoConfig.for_model(
        "llama", vocab_size=2**15, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1,
    )  # fmt: skip
    model = hf.new_model(config, torch.float32)
    hf.chunk_loss(model, kernel)
    used = []
    for length in (64, 4096):  # the first pass loads kernels
        tokens = torch.zeros(1, length, dtype=torch.int64)
        torch.autograd.backward(hf.log_probs(model, MicroBatch(tokens, tokens)).sum())
        used.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return used[1] - used[0]


@pytest.mark.slow
def test_memory() -> None:
    (whole,), (chunked,) = (run_ranks(peak_bytes, 1, kernel) for kernel in ("whole", "chunked"))
    assert whole > 2.5 * 2**29
    assert chunked < 0.15 * whole
