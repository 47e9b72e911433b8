"""What test_eager.py's forked process does: attend by plain products, and see what is kept."""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace

import torch
from torch import Tensor, nn

HEADS, GROUPS, LENGTH, SIZE = 4, 2, 128, 16
CORES = {"llama": "EagerAttention", "gemma2": "EagerAttention", "gpt_oss": "SinkAttention"}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def kept_bytes() -> dict[tuple[str, str, str], int]:
    """By family, model implementation and precision."""
    both = {"hf": transformers_attention, "megatron": our_attention}
    return {
        (family, model, precision): _kept(both[model], family, dtype)
        for family in CORES
        for model in both
        for precision, dtype in DTYPES.items()
    }


def _kept(attention: Callable[..., Tensor], family: str, dtype: torch.dtype) -> int:
    """Bytes of all that is at least as large as the scores."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.numel() >= HEADS * LENGTH * LENGTH:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    shapes = [(1, heads, LENGTH, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    projected = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(family, *projected).sum()
    return sum(kept.values())


def transformers_attention(family: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`eager_attention_forward`: [batch, heads, sequence, size]."""
    module = SimpleNamespace(
        num_key_value_groups=HEADS // GROUPS,
        training=True,
        head_dim=SIZE,
        sinks=torch.zeros(HEADS, dtype=q.dtype, requires_grad=True),
    )
    capped = {"softcap": 50.0} if family == "gemma2" else {}
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=q.dtype)
    out, _ = modeling.eager_attention_forward(module, q, k, v, mask, scaling=1.0, **capped)
    assert isinstance(out, Tensor)
    return out


def our_attention(family: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by the core attention of our megatron-core layers."""
    kind = getattr(import_module("toolkit.models.megatron.attention"), CORES[family])
    core = kind.__new__(kind)
    nn.Module.__init__(core)
    core.scale, core.window, core.cap = 1.0, None, 50.0 if family == "gemma2" else None
    core.softmax_offset = nn.Parameter(torch.zeros(HEADS, dtype=q.dtype))
    out = core._attend(q, k, v, core._mask(q, None), 0.0)
    assert isinstance(out, Tensor)
    return out
