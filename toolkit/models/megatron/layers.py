"""Layer specifications of the Megatron model, which need neither Transformer Engine nor Apex.

megatron-core builds a layer from a specification that names the class of each part. These
name megatron-core's own parallel linear layers, torch's norms and the attention of
`attention.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
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
from torch import Tensor
from torch.nn.functional import dropout

from toolkit.models.families import MegatronModel
from toolkit.models.megatron import versions
from toolkit.models.megatron.attention import (
    CausalAttention,
    EagerAttention,
    SinkAttention,
)
from toolkit.models.megatron.experts import GroupedExperts
from toolkit.models.megatron.latent_attention import latent_attention
from toolkit.models.megatron.norms import FullWidthNorm, Norm, NormThenAdd, changed_then_added


class ExpertDown(RowParallelLinear):  # type: ignore[misc]
    """The second linear layer of an expert with biases, of which tensor parallelism gives each
    rank some input features: one of the ranks adds the bias to what is summed over them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        group = options["tp_group"]
        self.adds = float(group.rank() == 0)
        # The gradients of a split expert are summed over its ranks. One that is not split is
        # only on one rank, though its bias is not a part of a larger one.
        self.bias.sequence_parallel = group.size() > 1
        if group.size() == 1:
            set_tensor_model_parallel_attributes(self.bias, True, 0, 1)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of the sum, and its part of the bias."""
        output, bias = super().forward(input_)
        if not self.explicit_expert_comm:
            output = output.clone()  # megatron-core adds the bias in place: not to a view
        return output, bias * self.adds


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
    """residual + factor · branch. megatron-core calls functions alone, no other callable."""

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
    core: Any = EagerAttention if model.eager else CausalAttention
    if model.score_cap is not None:
        core = ModuleSpec(module=EagerAttention, params={"cap": model.score_cap})
    if config.softmax_type == "learnable":
        core = SinkAttention
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
    return ModuleSpec(
        module=ParallelResidualLayer if model.parallel_residual else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=before,
            self_attention=_attention(model, config),
            self_attn_bda=add,
            pre_mlp_layernorm=before,
            mlp=_experts(config) if experts else versions.mlp(_layers_of_mlp()),
            mlp_bda=add,
        ),
    )


def _head_norm(model: MegatronModel, config: TransformerConfig, heads: int | None) -> Any:
    """The norm of queries, or of keys, of which the model has `heads`."""
    if model.norms_over_width:
        return ModuleSpec(module=FullWidthNorm, params={"heads": heads})
    return Norm if config.qk_layernorm else IdentityOp


def _layers_of_mlp(down: type = RowParallelLinear) -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=down)


def _experts(config: TransformerConfig) -> ModuleSpec:
    down = ExpertDown if config.add_bias_linear else RowParallelLinear
    routed = ModuleSpec(
        module=GroupedExperts if config.moe_grouped_gemm else SequentialMLP,
        submodules=_layers_of_mlp(down),
    )
    shared = ModuleSpec(module=SharedExpertMLP, submodules=_layers_of_mlp())
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(experts=routed, shared_experts=shared),
    )
