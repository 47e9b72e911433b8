"""GPT-NeoX's model as a pipeline module of DeepSpeed: its numbers and names of layers.

The decoder layer is transformers', whose parameters have the names that NeoX gives them.
"""

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PretrainedConfig
from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXLayer,
    GPTNeoXRotaryEmbedding,
)


class Embedding(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.word_embeddings(tokens)


class Layer(GPTNeoXLayer):
    """A decoder layer that computes the rotary angles itself."""

    def __init__(self, config: PretrainedConfig, number: int) -> None:
        super().__init__(config, number)
        self.angles = [GPTNeoXRotaryEmbedding(config)]  # in a list: no buffers of its own

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        positions = torch.arange(hidden.shape[1])[None]
        found: Any = super().forward(
            hidden,
            attention_mask=None,
            position_embeddings=self.angles[0](hidden, positions),
            use_cache=False,
        )
        return found[0] if isinstance(found, tuple) else found


class Norm(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class Head(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.final_linear = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.final_linear(hidden)


def _same(hidden: Tensor) -> Tensor:
    return hidden


class Loss:
    """The sum over a micro batch's tokens, times `per_token`."""

    per_token = 1.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        summed = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return summed * Loss.per_token


class SequentialModel(nn.Module):
    """The model without DeepSpeed's pipeline."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        modules = [nn.Identity() if one is _same else one.build() for one in _layers(config)]
        self.sequential = nn.Sequential(*modules)

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.sequential(input_ids))


def pipeline(config: PretrainedConfig, stages: int) -> PipelineModule:
    """The model, split into this number of stages."""
    return PipelineModule(
        _layers(config), num_stages=stages, loss_fn=Loss(), partition_method="uniform"
    )


def _layers(config: PretrainedConfig) -> list[Any]:
    config._attn_implementation = "sdpa"
    layers = [LayerSpec(Layer, config, number) for number in range(config.num_hidden_layers)]
    ends = LayerSpec(Norm, config), LayerSpec(Head, config)
    return [LayerSpec(Embedding, config), _same, *layers, _same, *ends]
