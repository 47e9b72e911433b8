"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) without Transformer Engine."""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from toolkit.models.megatron.norms import local_device
from toolkit.models.megatron.versions import SpecifiedLatentAttention


class ReplicatedLinear(nn.Module):
    """A projection without bias that is replicated on every tensor-parallel rank.

    megatron-core's own layer, which splits the rows, gathers the keys' rotated part from all
    ranks, and loses the gradient of the other ranks' heads in the backward pass.
    """

    def __init__(
        self, inputs: int, outputs: int, *, config: TransformerConfig, **_: object
    ) -> None:
        super().__init__()
        empty = torch.empty(outputs, inputs, device=local_device(), dtype=config.params_dtype)
        self.weight = nn.Parameter(empty)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[positions, batch, in] → [positions, batch, out], and no bias."""
        return functional.linear(x, self.weight), None


class LatentAttention(SpecifiedLatentAttention):
    """megatron-core's latent attention with the positions of a batch, which it does not
    support."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._positions: Tensor | None = None
        self.rotary_pos_emb.register_forward_hook(self._rotate_by_positions)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *arguments: Any,
        rotary_pos_emb: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[sequence, batch, hidden] → the same, and its bias. `rotary_pos_emb` contains
        positions instead of angles, which this attention computes itself: int64 [sequence,
        batch]; None: 0, 1, 2, …. As an argument, it is also correct if a layer is recomputed
        after the next batch."""
        self._positions = rotary_pos_emb
        output: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states, attention_mask, *arguments, **options
        )
        return output

    def _rotate_by_positions(self, _: object, __: object, turned: Any) -> Any:
        """[sequence, 1, 1, size] for 0, 1, 2, … → [sequence, batch, 1, size]; YaRN has a factor
        besides the angles."""
        if self._positions is None:
            return None
        if isinstance(turned, tuple):
            return turned[0][self._positions, 0], turned[1]
        return turned[self._positions, 0]


def latent_attention(core_attention: type, norm: type) -> ModuleSpec:
    """The specification of latent self-attention."""
    # The only other class that megatron-core accepts, by this name, as replicated.
    multi_latent_attention.TELinear = ReplicatedLinear
    parts: dict[str, Any] = {
        "linear_q_proj": ColumnParallelLinear,
        "linear_q_down_proj": ReplicatedLinear,
        "linear_q_up_proj": ColumnParallelLinear,
        "linear_kv_down_proj": ReplicatedLinear,
        "linear_kv_up_proj": ColumnParallelLinear,
        "core_attention": core_attention,
        "linear_proj": RowParallelLinear,
        "q_layernorm": norm,
        "kv_layernorm": norm,
    }
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(**parts),
    )
