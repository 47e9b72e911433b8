"""Small transformers models, and what they keep for the backward pass."""

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from tests.models.configs import CONFIGS
from toolkit.batch import MicroBatch
from toolkit.layout import Recompute
from toolkit.models import compiled, liger
from toolkit.models import huggingface as hf
from toolkit.models.families import attention
from toolkit.models.model import is_dropout

ACTIVATIONS = {
    "hidden_size": 256, "intermediate_size": 896, "max_position_embeddings": 512,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip


def small_model(name: str, **changes: Any) -> PreTrainedModel:
    config = {"model_type": name.split()[0], **CONFIGS[name], **changes}
    built = AutoConfig.for_model(**config)
    built._attn_implementation = attention(config)
    for key in filter(is_dropout, built.to_dict()):
        setattr(built, key, 0.0)
    torch.manual_seed(0)
    return hf.new_model(built, torch.float32)


def batch(rows: int = 2, length: int = 16) -> MicroBatch:
    tokens = torch.randint(90, (rows, length), generator=torch.Generator().manual_seed(rows))
    return MicroBatch(tokens, tokens.roll(-1, 1))


def saved_bytes(
    layers: int,
    parts: Any,
    recompute: Recompute,
    fused: Any = "none",
) -> int:
    """What a model of so many layers keeps on its device for the backward pass, besides its
    weights."""
    model = small_model("llama", **ACTIVATIONS, num_hidden_layers=layers).to(torch.bfloat16)
    compiled.compile_layers(model.train(), parts)
    liger.fuse(model, fused)
    hf.enable_recompute(model, recompute)
    own = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        assert hf.log_probs(model, batch(1, 512)).requires_grad
    return sum(
        tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in own
    )
