"""Renders a plan as megatron-core's arguments: the content of `megatron.json`.

Plain data with megatron-core's field names, one section per class that it configures. Renderers
translate. Nothing is decided here.
"""

from collections.abc import Mapping
from typing import Any

from toolkit.errors import PlanError
from toolkit.layout import DTYPES, Layout
from toolkit.models.families import MegatronModel, megatron_model
from toolkit.models.hub import model_config
from toolkit.models.megatron.config import gpt_arguments, transformer_arguments
from toolkit.plan.planner import first_loss_scale
from toolkit.recipe.schema import ModelSection, OptimizerSection, Recipe, TrainingSection


def render(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """The arguments of TransformerConfig, GPTModel, DistributedDataParallelConfig and
    OptimizerConfig."""
    model = megatron_model(model_config(recipe.model))
    precision = recipe.training.precision
    sections = render_model(model, layout, precision, recipe.training.deterministic)
    if layout.vpp > 1:
        sections["transformer"] |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        if recipe.cluster.gpu == "cpu":
            # megatron-core frees what is still being sent. NCCL keeps it; gloo would send what
            # takes its place.
            sections["transformer"]["deallocate_pipeline_outputs"] = False
    return {
        **sections,
        "ddp": ddp_arguments(layout),
        "optimizer": {
            **optimizer_arguments(recipe.optimizer, layout, precision),
            **_loss_scaling(layout, recipe.training),
        },
    }


def render_model(
    model: MegatronModel, layout: Layout, precision: str, deterministic: bool = False
) -> dict[str, Any]:
    """The two sections that describe the model."""
    transformer = transformer_arguments(model, layout, precision)
    if deterministic:
        transformer["deterministic_mode"] = True
    return {"transformer": transformer, "gpt": gpt_arguments(model, layout)}


def loaded_model(section: ModelSection, config: Mapping[str, Any]) -> MegatronModel:
    """The model of a loaded Hugging Face config, which must be the planned one.

    A recipe may state only a part of a pretrained model's config. Raises PlanError if the whole
    config describes another model, or one that megatron-core does not support.
    """
    loaded, planned = megatron_model(config), megatron_model(model_config(section))
    for ours, theirs in ((planned.transformer, loaded.transformer), (planned.gpt, loaded.gpt)):
        for key in ours.keys() | theirs.keys():
            if ours.get(key) != theirs.get(key):
                raise PlanError(
                    f"model.config: planned with megatron-core's {key} = {ours.get(key)!r}, "
                    f"but {section.hub} means {theirs.get(key)!r}",
                    fix="state in model.config what the hub's config.json says of it",
                )
    return loaded


def ddp_arguments(layout: Layout) -> dict[str, Any]:
    """Fields of DistributedDataParallelConfig. Gradients are summed in fp32 during
    the backward pass, and updated weights are gathered during the forward pass."""
    overlap, sharded = layout.dp * layout.cp > 1, layout.zero_stage == 1
    return {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": sharded,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap and sharded,
    }


def optimizer_arguments(
    optimizer: OptimizerSection, layout: Layout, precision: str
) -> dict[str, Any]:
    """Fields of OptimizerConfig: AdamW with fp32 master weights and moments."""
    return {
        "optimizer": "adam",
        "lr": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_eps": optimizer.eps,
        "clip_grad": optimizer.clip_grad_norm or 0.0,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "params_dtype": DTYPES[precision],
        "use_distributed_optimizer": layout.zero_stage == 1,
    }


def _loss_scaling(layout: Layout, training: TrainingSection) -> dict[str, float]:
    """Initial and smallest loss scale. The loss here is the sum over tokens, while the plan's
    scale is for their mean. Powers of two, which cause no rounding."""
    loss_scale, length = first_loss_scale(training.precision), training.sequence_length
    if loss_scale is None:
        return {}
    tokens = layout.micro_batch * layout.gradient_accumulation * length // layout.cp
    smallest = 2.0 ** -(tokens.bit_length() - 1)
    return {"initial_loss_scale": loss_scale * smallest, "min_loss_scale": smallest}
