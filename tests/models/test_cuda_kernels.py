"""What transformers' models do on CUDA alone: grouped heads, and no wait for the GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import MixtralConfig

from toolkit.batch import MicroBatch
from toolkit.models import documents
from toolkit.models import huggingface as hf

CONFIG = MixtralConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
)


def test_grouped_heads_are_repeated_where_no_kernel_takes_them() -> None:
    def takes(dtype: torch.dtype, device: str = "cuda") -> bool:
        key = torch.empty(1, 2, 8, 16, dtype=dtype, device=device)
        return documents.takes_grouped_heads(None, key, key)

    with FakeTensorMode():
        assert takes(torch.bfloat16)
        assert not takes(torch.float32)
        assert takes(torch.float32, "cpu")


def test_nobody_looks_for_documents_in_the_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would wait for the GPU in each forward pass."""

    def refuse(_: torch.Tensor) -> None:
        raise AssertionError("looked")

    monkeypatch.setattr(documents, "_find_documents", refuse)
    model = hf.new_model(CONFIG, torch.float32)
    tokens = torch.arange(32).view(2, 16)
    place = torch.arange(16).expand(2, -1) % 8
    segments = (torch.arange(16).expand(2, -1) // 8).int()
    whole = hf.log_probs(model, MicroBatch(tokens, tokens))
    counted = torch.arange(16).expand(2, -1)
    assert torch.equal(whole, hf.log_probs(model, MicroBatch(tokens, tokens, counted)))
    parts = hf.log_probs(model, MicroBatch(tokens, tokens, positions=place, segments=segments))
    alone = hf.log_probs(model, MicroBatch(tokens[:, 8:], tokens[:, 8:]))
    torch.testing.assert_close(parts[:, 8:], alone)
    with pytest.raises(AssertionError, match="looked"):
        model(input_ids=tokens, position_ids=place, use_cache=False)
