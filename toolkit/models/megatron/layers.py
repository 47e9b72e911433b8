"""Layer specifications of the Megatron model, which need neither Transformer Engine nor Apex.

megatron-core builds a layer from a specification that names the class of each part. These
name megatron-core's own parallel linear layers, torch's norms and torch's fused attention,
which is the plan's `sdpa`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention, softmax

from toolkit.models.families import MegatronModel
from toolkit.models.megatron.latent_attention import latent_attention
from toolkit.models.megatron.norms import FullWidthNorm, Norm, NormThenAdd, changed_then_added


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """softmax(q·k)·v over the past by torch's fused kernels, with an optional window."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        self.dropout = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        self.scale = config.softmax_scale if softmax_scale is None else softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window: int | None = config.window_size[0] if windowed else None
        """Positions before a query that it sees; None for all of them."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **_: object,
    ) -> Tensor:
        """[sequence, batch, heads, size] and keys and values of [..., groups, size] →
        [sequence, batch, heads · size]. `attention_mask`: `document_masks`, or None where a
        row is one document."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        length = q.shape[2]
        mask = None
        if attention_mask is not None:
            mask = attention_mask[0 if self.window is None else 1]
        elif self.window is not None and self.window + 1 < length:
            mask = _band(length, self.window, q.device)
        if mask is not None:
            # CUDA's fused kernels take either a mask or grouped heads.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        with self._own_random_stream():
            context = self._attend(q, k, v, mask)
        return context.permute(2, 0, 1, 3).flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[batch, heads, sequence, size] each → the same; `mask` None: all the past."""
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )

    def _own_random_stream(self) -> AbstractContextManager[None]:
        """A block in which each tensor-parallel rank, having other heads, draws its own
        dropout; under sequence parallel the whole layer already does."""
        random = self.dropout > 0 and self.training and not self.config.sequence_parallel
        return get_cuda_rng_tracker().fork() if random else nullcontext()


class CappedAttention(CausalAttention):
    """softmax(c · tanh(q·k / c))·v, which fused kernels lack: the scores are kept."""

    def __init__(self, *arguments: Any, cap: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.cap = cap

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """See `CausalAttention._attend`; the softmax is in fp32, as in transformers."""
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.tanh(q @ k.transpose(2, 3) * self.scale / self.cap) * self.cap
        if mask is None:
            mask = _band(q.shape[2], q.shape[2], q.device)
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        else:
            scores = scores + mask
        weights = softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return dropout(weights, self.dropout, self.training) @ v


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """True where query i sees key j: i - window ≤ j ≤ i."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    return (distance >= 0) & (distance <= window)


def document_masks(segments: Tensor, config: TransformerConfig) -> Tensor:
    """The masks of a micro batch whose documents are isolated, in the compute precision:
    [1 or 2, batch, 1, sequence, sequence], 0 where a query sees a key, else -inf.

    The first is that of layers that see all the past of a document, the second that of layers
    with a window. All layers share them: a boolean mask, and one made in each layer, would be
    kept for the backward pass once per layer.
    """
    length = segments.shape[1]
    windows = [length] if config.window_size is None else [length, config.window_size[0]]
    sees = torch.stack([_band(length, window, segments.device) for window in windows])
    same = segments[:, :, None] == segments[:, None, :]
    hidden = ~(sees[:, None] & same)[:, :, None]
    scores = torch.zeros(hidden.shape, dtype=config.params_dtype, device=segments.device)
    return scores.masked_fill_(hidden, float("-inf"))


class ParallelResidualLayer(TransformerLayer):  # type: ignore[misc]
    """x + attention(norm₁ x) + mlp(norm₂ x), as gpt_neox has it."""

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[sequence, batch, hidden] → the same, and no context."""
        kwargs.pop("context", None)
        kwargs.pop("context_mask", None)
        kwargs.pop("padding_mask", None)
        attention = self.self_attention(self.input_layernorm(hidden_states), *args, **kwargs)
        mlp = self.mlp(self.pre_mlp_layernorm(hidden_states))
        output = hidden_states
        for branch, bias in (mlp, attention):
            branch = branch if bias is None else branch + bias
            output = output + dropout(branch, self.hidden_dropout, self.training)
        return output, None


def scaled_add(factor: float) -> Callable[[bool, bool], Callable[..., Tensor]]:
    """residual + factor · branch; megatron-core calls functions alone, no other callable."""

    def choose(training: bool, fused: bool) -> Callable[..., Tensor]:
        return changed_then_added(partial(torch.mul, other=factor), training, fused)

    return choose


def chunk_spec(
    model: MegatronModel, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline chunk, and the final norm."""
    first = get_transformer_layer_offset(config, vp_stage)
    count = get_num_layers_to_build(config, vp_stage)
    layers = [
        _layer(model, config, experts=number in model.moe_layers)
        for number in range(first, first + count)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def _attention(model: MegatronModel, config: TransformerConfig) -> ModuleSpec:
    core: Any = CausalAttention
    if model.score_cap is not None:
        core = ModuleSpec(module=CappedAttention, params={"cap": model.score_cap})
    if config.multi_latent_attention:
        return latent_attention(core, Norm)
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=core,
            linear_proj=RowParallelLinear,
            q_layernorm=_head_norm(model, config, config.num_attention_heads),
            k_layernorm=_head_norm(model, config, config.num_query_groups),
        ),
    )


def _layer(model: MegatronModel, config: TransformerConfig, *, experts: bool) -> ModuleSpec:
    before = IdentityOp if model.norms == "after" else Norm
    add: Any = get_bias_dropout_add
    if model.residual_scale != 1:
        add = scaled_add(model.residual_scale)
    if model.norms != "before":
        add = ModuleSpec(module=NormThenAdd, params={"config": config})
    norms = _NORM_KEYS_OF_EXPERTS if experts else _NORM_KEYS
    if config.multi_latent_attention:
        norms = _NORM_KEYS_OF_LATENTS | {k: v for k, v in norms.items() if "mlp" in k}
    return ModuleSpec(
        module=ParallelResidualLayer if model.parallel_residual else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=before,
            self_attention=_attention(model, config),
            self_attn_bda=add,
            pre_mlp_layernorm=before,
            mlp=_experts(config) if experts else _dense_mlp(),
            mlp_bda=add,
            sharded_state_dict_keys_map=norms,
        ),
    )


def _head_norm(model: MegatronModel, config: TransformerConfig, heads: int | None) -> Any:
    """The norm of queries, or of keys, of which the model has `heads`."""
    if model.norms_over_width:
        return ModuleSpec(module=FullWidthNorm, params={"heads": heads})
    return Norm if config.qk_layernorm else IdentityOp


_NORM_KEYS_OF_EXPERTS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_NORM_KEYS = _NORM_KEYS_OF_EXPERTS | {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_NORM_KEYS_OF_LATENTS = {
    f"self_attention.{part}_layernorm.": f"self_attention.linear_{part}_up_proj.layer_norm_"
    for part in ("q", "kv")
}
"""Names in distributed checkpoints: those of Transformer Engine's layers, which hold the norm
inside the linear layer that follows it, so that either kind of layer reads the other's."""


def _dense_mlp() -> ModuleSpec:
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(module=MLP, submodules=parts)


def _experts(config: TransformerConfig) -> ModuleSpec:
    return get_moe_module_spec(
        use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False
    )
