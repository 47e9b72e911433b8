"""Models of the engine `deepspeed`: a transformers model, or one rank's part of a Megatron
model.

Both are one `nn.Module` to DeepSpeed. They differ in how they are built and filled, in
which ranks hold copies of the same parameters, and in how they turn a batch into
log-probabilities.
"""

import logging
import os
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as hf_initialization

from toolkit.batch import MicroBatch
from toolkit.checkpoint.shards import StateShard, bias_shards, parameter_blocks
from toolkit.engines import distributed
from toolkit.engines.balance import Balance
from toolkit.engines.deepspeed.state import PlacedParameter
from toolkit.engines.megatron.config import render_model
from toolkit.engines.setup import EngineSetup
from toolkit.layout import DTYPES
from toolkit.models import huggingface as hf
from toolkit.models.adapters.huggingface import inject
from toolkit.models.context import Context
from toolkit.models.frozen import freeze
from toolkit.models.weights import WeightSource
from toolkit.system.interpreter import hidden


def import_deepspeed() -> Any:
    """DeepSpeed without its INFO log lines.

    By default, it probes every operator with the compiler, and on a CPU silently compiles a
    shared-memory all-reduce at its first use, for a minute or more. gloo is used instead.
    Its autotuner would import MLflow where that is installed: most of the time that it takes.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with hidden("mlflow"):
        import deepspeed

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


class TransformersModel:
    """A whole transformers model. Under ZeRO-3 it is sharded while it is built."""

    mpu: Any = None
    """DeepSpeed's view of the model-parallel groups. None without them."""
    data_group: dist.ProcessGroup | None = None
    """Ranks that hold the same parameters and different samples. None for all."""

    def __init__(self, setup: EngineSetup, context: Context | None) -> None:
        self.config, self.weights = setup.model_config, setup.weights
        model = _build_transformers(setup)
        freeze(hf.tensors_of(model), setup.frozen)
        setup.settle_kernels(model)
        hf.enable_recompute(model, setup.layout.recompute)
        self.module = model
        self.balance = Balance.of_transformers(setup, model, context)

    def seed_dropout(self) -> None:
        """Nothing: further random streams of the next step, which torch's seed does not set."""

    def log_probs(
        self, engine: nn.Module, batch: MicroBatch, context: Context | None
    ) -> Tensor:
        """log p(label), 0 where the label is `IGNORE_INDEX`: fp32 [micro_batch, sequence]."""
        return hf.log_probs(engine, batch, context)

    def gradient_norm(self, module: nn.Module) -> Tensor:
        """L2 norm of the whole model's gradients: float64 scalar."""
        return distributed.gradient_norm(module.parameters())

    def restore_buffers(self, module: nn.Module) -> None:
        """Restore the fp32 values of buffers that DeepSpeed cast to 16 bits."""
        hf.restore_buffers(module, self.config)
        hf.fill_biases(module, self.weights)

    def biases(self) -> Iterator[StateShard]:
        """The routers' correction biases."""
        return bias_shards(self.module, saved_here=dist.get_rank() == 0)

    def placed(self) -> Iterator[PlacedParameter]:
        """Every parameter with the checkpoint rectangles that it is made of."""
        for name, parameter in hf.named_parameters(self.module):
            shape = getattr(parameter, "ds_shape", parameter.shape)
            yield PlacedParameter(parameter, parameter_blocks(name, shape), saved_here=True)

    def close(self) -> None:
        """Leave the group of ZeRO++, which DeepSpeed makes only once."""
        from deepspeed.utils import groups

        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


class MegatronShard:
    """This rank's tensor-parallel part of a GPTModel (one pipeline stage). Its methods do what
    those of `TransformersModel` do."""

    def __init__(self, setup: EngineSetup) -> None:
        from megatron.core import parallel_state

        from toolkit.models.adapters.megatron import attach
        from toolkit.models.megatron import model, weights

        model.join_groups(setup.layout, setup.recipe.training.seed)
        self.config = setup.model_config
        assert setup.megatron is not None
        self.model, self.ends_of = setup.megatron, setup.ends_of
        rendered = render_model(
            self.model, setup.layout, setup.precision, setup.recipe.training.deterministic
        )
        self.chunks = model.build_chunks(self.model, **rendered, layout=setup.layout)
        self.module = self.chunks[0]
        self.balance = Balance(setup)  # None: models with experts use another engine
        attach(self.chunks, setup.lora)
        weights.fill(self.chunks, self.model, setup.weights)
        weights.freeze(self.chunks, self.model, setup.frozen)
        self.data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.mpu = _mpu(self.tensor_group, self.data_group)
        self._sum_partial_gradients()

    def _sum_partial_gradients(self) -> None:
        """Sum partial gradients over the tensor group, before DeepSpeed takes them.

        With sequence parallel these are the gradients of norms and biases. Norms of query and
        key heads always, because each rank has different heads.
        """

        def summed(gradient: Tensor) -> Tensor:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=self.tensor_group)
            return gradient

        for name, parameter in self.module.named_parameters():
            split = getattr(parameter, "sequence_parallel", False)
            is_partial = split or "q_layernorm" in name or "k_layernorm" in name
            if is_partial and parameter.requires_grad and self.tensor_group.size() > 1:
                parameter.register_hook(summed)

    def seed_dropout(self) -> None:
        from toolkit.models.megatron.model import seed_dropout

        seed_dropout()

    def log_probs(
        self, engine: nn.Module, batch: MicroBatch, context: Context | None
    ) -> Tensor:
        from toolkit.models.megatron.model import log_probs

        assert context is None, "the model spreads its rows itself"
        where = batch.positions, batch.segments, self.ends_of(batch)
        losses = engine(batch.input_ids, *where, labels=batch.labels)
        return log_probs(losses, batch)

    def gradient_norm(self, module: nn.Module) -> Tensor:
        """Norm over split parameters, and once over those that each rank of the group has."""
        split: list[nn.Parameter] = []
        whole: list[nn.Parameter] = []
        for parameter in filter(lambda one: one.requires_grad, module.parameters()):
            is_split = getattr(parameter, "tensor_model_parallel", False)
            (split if is_split else whole).append(parameter)
        squares = [distributed.gradient_norm(some).square() for some in (split, whole) if some]
        if split:
            dist.all_reduce(squares[0], group=self.tensor_group)
        return torch.stack(squares).sum().sqrt()

    def restore_buffers(self, module: nn.Module) -> None:
        """Nothing."""

    def biases(self) -> Iterator[StateShard]:
        """None: models with experts use another engine."""
        return iter(())

    def placed(self) -> Iterator[PlacedParameter]:
        from toolkit.models.megatron import weights

        for shard in weights.shards(self.chunks, self.model):
            yield PlacedParameter(shard.parameter, shard.blocks, weights.saved_here(shard))

    def close(self) -> None:
        """Leave the groups, which DeepSpeed forgets, too."""
        from deepspeed.utils import groups

        from toolkit.models.megatron.model import leave_groups

        groups.mpu = None
        leave_groups()


def _mpu(tensor: dist.ProcessGroup, data: dist.ProcessGroup) -> SimpleNamespace:
    """The functions through which DeepSpeed gets the groups."""
    functions: dict[str, Any] = {}
    groups = {"tensor_model_parallel": tensor, "model_parallel": tensor, "data_parallel": data}
    for name, group in groups.items():
        functions[f"get_{name}_group"] = lambda group=group: group
        functions[f"get_{name}_rank"] = partial(dist.get_rank, group)
        functions[f"get_{name}_world_size"] = partial(dist.get_world_size, group)
    return SimpleNamespace(**functions)


def _build_transformers(setup: EngineSetup) -> PreTrainedModel:
    """The model with its initial weights, sharded from the start with stage 3."""
    config, weights = setup.model_config, setup.weights
    dtype = getattr(torch, DTYPES[setup.precision])
    if setup.layout.zero_stage < 3:
        model = hf.empty_model(config, setup.ranks.device, dtype)
        inject(model, setup.lora)
        hf.fill(model, weights)
        return model
    deepspeed = import_deepspeed()
    sharded = deepspeed.zero.Init(config_dict_or_path=setup.engine_config)
    with hf_initialization.no_init_weights(), sharded:
        model = hf.new_model(config, dtype)
        inject(model, setup.lora)
    model.tie_weights()
    # Ranks use different experts, and DeepSpeed recognises only few such modules: inside
    # others, ranks would gather different weights and deadlock.
    if names := [name for name, part in model.named_modules() if _routes(name, part)]:
        deepspeed.utils.set_z3_leaf_modules_by_name(model, names)
        # Behind frozen weights, whose output has no gradient, it would drop the weights of such
        # a module before its backward pass.
        model.enable_input_require_grads()
    for name, parameter in hf.named_parameters(model):
        _fill_shard(name, parameter, weights)
    return model


def _routes(name: str, part: nn.Module) -> bool:
    """Whether this module calls only some of its experts, or holds their stacked weights, or is
    PEFT's wrapper of one that does, which adds to the weights before the module runs."""
    if hasattr(part, "parameter_name"):
        return True
    stacked = any(len(p.ds_shape) == 3 for p in part.parameters(recurse=False))  # type: ignore[attr-defined]
    listed = isinstance(getattr(part, "experts", None), nn.ModuleList)
    return listed or (stacked and "expert" in name)


@torch.no_grad()
def _fill_shard(name: str, parameter: nn.Parameter, weights: WeightSource) -> None:
    """Give a ZeRO-3 parameter its initial value.

    A rank writes only its own shard, elements [rank·n, (rank+1)·n) of the flattened
    parameter (the last shard is padded). A shard that DeepSpeed moved to NVMe, quantized
    or keeps twice (ZeRO++) cannot be written in place: then rank 0 fills the gathered
    parameter, one at a time.
    """
    shard = parameter.ds_tensor  # type: ignore[attr-defined]
    numel = int(parameter.ds_numel)  # type: ignore[attr-defined]
    quantized = hasattr(shard, "ds_quant_scale")
    copied = getattr(parameter, "ds_secondary_tensor", None) is not None
    if shard.numel() == shard.ds_numel and not quantized and not copied:
        start = dist.get_rank() * shard.numel()
        stop = min(start + shard.numel(), numel)
        if start < stop:
            shard[: stop - start].copy_(weights.read(name, start, stop))
        return
    with import_deepspeed().zero.GatheredParameters([parameter], modifier_rank=0):
        if dist.get_rank() == 0:
            parameter.copy_(weights.read(name, 0, numel).view_as(parameter))
