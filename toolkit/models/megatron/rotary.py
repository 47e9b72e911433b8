"""Rotary positions as transformers computes them.

megatron-core's own scalings fix constants that configs state, or differ in their formula. So
the frequencies are those of transformers' `ROPE_INIT_FUNCTIONS`, for both implementations.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from toolkit.models.megatron.versions import scale_rotation

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types whose frequencies depend on the longest sequence of the micro batch."""


class Rotary:
    """The angles of one `rope_parameters`."""

    def __init__(
        self, parameters: Mapping[str, Any], config: TransformerConfig, max_positions: int
    ) -> None:
        if parameters["rope_type"] == "default":  # which transformers' table leaves out
            parameters = {**parameters, "rope_type": "linear", "factor": 1.0}
        self._type = parameters["rope_type"]
        self._neighbours = config.rotary_interleaved
        latent = config.multi_latent_attention
        self._config = PretrainedConfig(
            rope_parameters=dict(parameters),
            head_dim=config.qk_pos_emb_head_dim if latent else config.kv_channels,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            max_position_embeddings=max_positions,
        )
        self._frequencies, self.attention_factor = self._compute(None)

    def _compute(self, length: Tensor | None) -> tuple[Tensor, float]:
        device = torch.device("cpu") if length is None else length.device
        compute = ROPE_INIT_FUNCTIONS[self._type]
        frequencies, factor = compute(self._config, device, seq_len=length)
        return frequencies, factor

    def angles(self, positions: Tensor, longest: Tensor | None = None) -> Tensor:
        """Positions [batch, sequence] → fp32 [sequence, batch, 1, size], in the form of
        megatron-core's attention. `longest`: length of the longest document, where `positions`
        are only a part of it."""
        if self._type in LENGTH_DEPENDENT:
            longest = positions.max() + 1 if longest is None else longest
            self._frequencies, _ = self._compute(longest)
        self._frequencies = self._frequencies.to(positions.device)
        halves = positions.T[..., None, None].float() * self._frequencies
        if self._neighbours:
            return halves.repeat_interleave(2, dim=-1)
        return torch.cat((halves, halves), dim=-1)


def choose_rotation(attention: nn.Module, factor: float) -> None:
    """Make an attention layer use the second of two stacked tables of angles if it has a
    window, with cosine and sine times `factor`, and the first otherwise."""
    windowed = attention.core_attention.window is not None  # type: ignore[union-attr]
    if windowed:
        scale_rotation(attention, factor)

    def choose(
        _: object, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return inputs, {**options, "rotary_pos_emb": options["rotary_pos_emb"][int(windowed)]}

    attention.register_forward_pre_hook(choose, with_kwargs=True)
