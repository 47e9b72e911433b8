"""Expert parallel of transformers' models: DeepSpeed's AutoEP.

Its layers hold a range of the experts, and send each token to the ranks that hold its own. They
are made without storage here, so that a rank allocates and draws only what it holds.
"""

import re
from collections.abc import Iterator

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from toolkit.checkpoint.shards import parameter_blocks, whole_block
from toolkit.engines.deepspeed.state import PlacedParameter
from toolkit.engines.deepspeed.tensor_parallel import allocate
from toolkit.engines.setup import EngineSetup
from toolkit.models import huggingface as hf
from toolkit.models.routers import SCORES

_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(w[123])")


class _InFp32(nn.Linear):
    """How transformers computes the logits of routers that score by sigmoids."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input.float(), self.weight.float())


def build(setup: EngineSetup, dtype: torch.dtype) -> PreTrainedModel:
    """The model with this rank's experts, filled."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    degree, device = setup.layout.ep, setup.ranks.device
    with init_empty_weights(include_buffers=False):
        model = hf.new_model(setup.model_config, dtype)
    model.tie_weights()
    grouped = setup.layout.experts == "grouped"
    score = SCORES[setup.model_config.model_type]
    scale = getattr(setup.model_config, "routed_scaling_factor", None)
    config = AutoEPConfig(
        enabled=True,
        autoep_size=degree,
        use_grouped_mm=grouped,
        disable_triton_grouped_mm=dtype == torch.float32,  # it would multiply in TF32
        score_func=score,
        routed_scaling_factor="auto" if scale is None else scale,  # else a warning per layer
    )
    for mixture in AutoEP(model, config).ep_parser():
        whole = model.get_submodule(mixture.moe_module_name)
        with torch.device("meta"):
            rank = setup.ranks.rank % degree
            layer = AutoEPMoELayer(mixture, whole, degree, rank, config).to(dtype)
        router = layer.router
        # Names of parameters and buffers are transformers'.
        for own, name in (
            ("router", mixture.router_name),
            ("shared_experts", mixture.shared_experts_name),
            ("shared_experts_gate", mixture.shared_experts_gate_name),
        ):
            if (module := layer._modules.pop(own, None)) is not None:
                vars(layer)[own] = layer._modules[name] = module
        if score == "sigmoid":
            router.gate.__class__ = _InFp32
        # A statistic that nothing reads; a buffer would be cast and restored.
        del layer.tokens_per_expert
        layer.tokens_per_expert = torch.zeros(mixture.num_experts, device=device)
        model.set_submodule(mixture.moe_module_name, layer)
    allocate(model, device)
    with torch.no_grad():
        for parameter, blocks, _ in placed(model, degree, setup.ranks.rank):
            values = [setup.weights.read_block(block).reshape(-1) for block in blocks]
            parameter.copy_(torch.cat(values).view_as(parameter))
    return model.to(device)


def placed(model: nn.Module, degree: int, rank: int) -> Iterator[PlacedParameter]:
    """Every parameter of rank `rank`, whose names in checkpoints are transformers'."""
    for name, parameter in model.named_parameters():
        if stack := _EXPERTS.fullmatch(name):
            count, part = len(parameter), _PARTS[stack[2]]
            first = rank % degree * count
            names = (f"{stack[1]}.{first + one}.{part}.weight" for one in range(count))
            blocks = tuple(whole_block(one, parameter.shape[1:]) for one in names)
        else:
            own = name.replace(".mlp.gate.gate.", ".mlp.gate.")
            blocks = parameter_blocks(own, parameter.shape)
        yield PlacedParameter(parameter, blocks, saved_here=True)
