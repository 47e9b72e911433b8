"""What differs between the versions of megatron-core that DMT supports: 0.16 and 0.19.

Each function asks the installed version for what it has, not for its number.
"""

import inspect
import math
from copy import copy
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from typing import Any

from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

LanguageModel: Any
"""The class of megatron-core's language models: in 0.19, where GPTModel is deprecated, its
successor."""
if find_spec("megatron.core.models.hybrid"):
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    LanguageModel = HybridModel
else:
    from megatron.core.models.gpt.gpt_model import GPTModel

    LanguageModel = GPTModel


class HybridLayers(TransformerBlock):  # type: ignore[misc]
    """The layers of a HybridModel that has attention and an MLP in each.

    The block of GPTModel, not the stack of the same module: that one's final norm is
    Transformer Engine's whatever its specification says; with sequence parallel its ranks
    would draw the same dropout for different positions; and its checkpoints number the layers
    where GPTModel's stack them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerBlockSubmodules,
        layer_type_list: list[str],
        pp_layer_offset: int,
        dtype: object,
        name: str,
        **options: Any,
    ) -> None:
        """What HybridModel passes: the layers of a chunk follow from the configuration, too,
        as does their type."""
        del layer_type_list, pp_layer_offset, dtype, name
        super().__init__(config, submodules, **options)


def layers_argument(
    layers: TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None
) -> dict[str, Any]:
    """How `LanguageModel` is told the layers of a chunk: HybridModel also wants the types (`*`
    has attention) of those of all chunks."""
    if LanguageModel.__name__ == "GPTModel":
        return {"transformer_layer_spec": layers}
    stages = [None] if vp_stage is None else range(config.virtual_pipeline_model_parallel_size)
    counts = [
        get_num_layers_to_build(config, stage, rank)
        for stage in stages
        for rank in range(config.pipeline_model_parallel_size)
    ]
    return {
        "hybrid_stack_spec": ModuleSpec(
            module=HybridLayers, submodules=layers, params={"vp_stage": vp_stage}
        ),
        "hybrid_layer_pattern": "|".join("*" * count for count in counts),
    }


def turn_neighbours(model: Any) -> None:
    """Make the angles of a model's rotation those that its configuration asks for: HybridModel
    does not tell its embedding that neighbours, not halves, are turned together."""
    if model.position_embedding_type == "rope" and not model.config.multi_latent_attention:
        model.rotary_pos_emb.rotary_interleaved = model.config.rotary_interleaved


def mlp(layers: MLPSubmodules) -> Any:
    """The specification of a dense MLP.

    0.16 takes a `ModuleSpec`; later versions, which would warn of one, a function.
    """
    build = getattr(MLP, "as_mlp_submodule", None)
    if build is None:
        return ModuleSpec(module=MLP, submodules=layers)
    return partial(build, submodules=layers)


def without_cuda_graphs() -> dict[str, Any]:
    """The argument of `TransformerConfig` that is not the default only because 0.16 warns of
    its own; where `cuda_graph_modules` exists, that is the name, and nothing is to be said."""
    known = {field.name for field in fields(TransformerConfig)}
    return {} if "cuda_graph_modules" in known else {"cuda_graph_scope": []}


_PADS = "align_size" in inspect.signature(moe_utils.permute).parameters


def permuted(tokens: Tensor, probs: Tensor | None, rows: Tensor) -> tuple[Any, ...]:
    """What `moe_utils.permute` returns: since 0.17 also offsets and counts of what it pads."""
    return (tokens, probs, rows, None, None) if _PADS else (tokens, probs, rows)


class SpecifiedLatentAttention(MLASelfAttention):  # type: ignore[misc]
    """megatron-core's latent attention, of the parts that its specification names.

    Later versions than 0.16 choose some themselves: where queries have no latent vector, they
    put a norm in front of them, which no family has.
    """

    def _resolve_qk_norm_config(self, submodules: object) -> dict[str, Any]:
        return vars(submodules)


def scale_rotation(attention: Any, factor: float) -> None:
    """Make a layer's attention multiply the cosine and sine of its rotation by `factor`.

    0.16 computes what it multiplies them by in each pass, from three settings of the config, if
    they exist: (0.1 · mscale · ln scaling + 1) / (0.1 · mscale_all_dim · ln scaling + 1). In
    later versions each layer keeps the number.
    """
    if hasattr(attention, "_yarn_concentration_factor"):
        attention._yarn_concentration_factor = factor
        return
    config = copy(attention.config)
    config.yarn_rotary_scaling_factor = math.e
    config.yarn_mscale = 10.0 * (factor - 1.0)
    config.yarn_mscale_all_dim = 0.0
    attention.config = config
