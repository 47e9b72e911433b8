"""What differs between the versions of megatron-core that DMT supports: 0.16 and 0.19.

Each function asks the installed version for what it has, not for its number.
"""

import math
from copy import copy
from dataclasses import fields
from functools import partial
from typing import Any

from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


def mlp(layers: MLPSubmodules) -> Any:
    """The specification of a dense MLP.

    0.16 takes a `ModuleSpec`. Later versions, which would warn of one, a function.
    """
    build = getattr(MLP, "as_mlp_submodule", None)
    if build is None:
        return ModuleSpec(module=MLP, submodules=layers)
    return partial(build, submodules=layers)


def without_cuda_graphs() -> dict[str, Any]:
    """The argument of `TransformerConfig` that is not the default only because 0.16 warns of
    its own. Where `cuda_graph_modules` exists, that is the name, and nothing is to be said."""
    known = {field.name for field in fields(TransformerConfig)}
    return {} if "cuda_graph_modules" in known else {"cuda_graph_scope": []}


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
    later versions each layer keeps the number. Latent attention gets it with the angles.
    """
    if isinstance(attention, SpecifiedLatentAttention):
        attention.rotary_pos_emb.factor = factor
        return
    if hasattr(attention, "_yarn_concentration_factor"):
        attention._yarn_concentration_factor = factor
        return
    config = copy(attention.config)
    config.yarn_rotary_scaling_factor = math.e
    config.yarn_mscale = 10.0 * (factor - 1.0)
    config.yarn_mscale_all_dim = 0.0
    attention.config = config
