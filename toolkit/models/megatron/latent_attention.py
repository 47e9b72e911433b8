"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) without Transformer Engine."""

from copy import copy
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


class GivenAngles(nn.Module):
    """Stands in for megatron-core's rotary embedding, which knows no positions."""

    factor = 1.0
    """Factor of cosine and sine."""

    def __init__(self) -> None:
        super().__init__()
        self.angles: Tensor | None = None

    def get_rotary_seq_len(self, *_: object) -> None:
        """Nothing: `forward` needs no length."""

    def forward(self, *_: object, **__: object) -> tuple[Tensor | None, float]:
        """The angles, and the factor."""
        return self.angles, self.factor


class LatentAttention(SpecifiedLatentAttention):
    """megatron-core's latent attention with the angles of a batch, as other layers have it."""

    config: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rotary_pos_emb = GivenAngles()
        self.config = copy(self.config)
        self.config.rope_type = "yarn"  # the type whose embedding returns a factor, too

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *arguments: Any,
        rotary_pos_emb: Tensor,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[sequence, batch, hidden] → the same, and its bias. As an argument, `rotary_pos_emb`
        is also correct if a layer is recomputed after the next batch."""
        self.rotary_pos_emb.angles = rotary_pos_emb
        output: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states, attention_mask, *arguments, **options
        )
        return output


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
