"""Expert parallel of transformers' models: DeepSpeed's AutoEP.

Its layers hold a range of the experts, and send each token to the ranks that hold its own. They
are made without storage here, so that a rank allocates and draws only what it holds.
"""

import re
from collections.abc import Iterator

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel

from toolkit.checkpoint.shards import parameter_blocks, whole_block
from toolkit.engines.deepspeed.state import PlacedParameter
from toolkit.engines.deepspeed.tensor_parallel import allocate
from toolkit.engines.setup import EngineSetup
from toolkit.models import huggingface as hf

_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(w[123])")


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
    config = AutoEPConfig(
        enabled=True,
        autoep_size=degree,
        use_grouped_mm=grouped,
        disable_triton_grouped_mm=dtype == torch.float32,  # it would multiply in TF32
    )
    for mixture in AutoEP(model, config).ep_parser():
        whole = model.get_submodule(mixture.moe_module_name)
        with torch.device("meta"):
            rank = setup.ranks.rank % degree
            layer = AutoEPMoELayer(mixture, whole, degree, rank, config).to(dtype)
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


def is_spread(parameter: nn.Parameter) -> bool:
    """Whether the ranks of an expert-parallel group hold different values of it."""
    return not getattr(parameter, "allreduce", True)


def placed(model: nn.Module, degree: int, rank: int) -> Iterator[PlacedParameter]:
    """Every parameter of rank `rank`, whose names in checkpoints are transformers'."""
    for name, parameter in model.named_parameters():
        if stack := _EXPERTS.fullmatch(name):
            count, part = len(parameter), _PARTS[stack[2]]
            first = rank % degree * count
            names = (f"{stack[1]}.{first + one}.{part}.weight" for one in range(count))
            blocks = tuple(whole_block(one, parameter.shape[1:]) for one in names)
        else:
            own = name.replace(".mlp.router.gate.", ".mlp.gate.")
            own = own.replace(".mlp.shared_experts", ".mlp.shared_expert")
            blocks = parameter_blocks(own, parameter.shape)
        yield PlacedParameter(parameter, blocks, saved_here=True)
