"""The arguments of megatron-core's model classes for one layout: plain data, no torch.

Keys have megatron-core's spelling. Values that are not plain there (dtypes, activation
functions) are strings until `model.build_chunks` needs them.
"""

from typing import Any

from toolkit.layout import DTYPES, Layout, padded_vocab, stage_layers
from toolkit.models.families import MegatronModel


def transformer_arguments(
    model: MegatronModel, layout: Layout, precision: str
) -> dict[str, Any]:
    """Fields of TransformerConfig."""
    return {
        **model.transformer,
        **_layout_arguments(model, layout),
        **_recompute_arguments(layout),
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "params_dtype": DTYPES[precision],
        "pipeline_dtype": DTYPES[precision],
        # The loss is a sum over tokens, divided by the global count at the end.
        "calculate_per_token_loss": True,
        "bias_activation_fusion": layout.fused != "none",
        # These need Apex or Transformer Engine.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }


def gpt_arguments(model: MegatronModel, layout: Layout) -> dict[str, Any]:
    """Arguments of GPTModel that are the same on every rank."""
    vocab = padded_vocab(model.gpt["vocab_size"], layout.tp)
    return {**model.gpt, "vocab_size": vocab}


def _layout_arguments(model: MegatronModel, layout: Layout) -> dict[str, Any]:
    layers = model.transformer["num_layers"]
    arguments: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "sequence_parallel": layout.sequence_parallel,
    }
    if layout.pp > 1:
        arguments["pipeline_model_parallel_layout"] = pipeline_layout(layers, layout)
        # The backward pass does not need the values of sent outputs.
        arguments["deallocate_pipeline_outputs"] = True
        # With two stages the previous and the next rank are the same one, and the
        # interleaved schedule's batched messages are matched in the wrong order.
        arguments["batch_p2p_comm"] = not (layout.pp == 2 and layout.vpp > 1)
        # The host would wait for the GPU after every message, for a bug of PyTorch before 2.0.
        arguments["batch_p2p_sync"] = False
    if model.moe_layers:
        arguments["moe_token_dispatcher_type"] = "alltoall"
        arguments["moe_grouped_gemm"] = layout.experts == "grouped"
        arguments["expert_tensor_parallel_size"] = expert_tensor(layout)
    return arguments


def expert_tensor(layout: Layout) -> int:
    """Tensor-parallel degree inside an expert: 1 with expert parallel."""
    return 1 if layout.ep > 1 else layout.tp


def pipeline_layout(layers: int, layout: Layout) -> list[list[str]]:
    """The content of each of the pp·vpp pipeline chunks, in the order of the model."""
    counts = stage_layers(layers, *layout.division)
    chunks = [["decoder"] * count for count in counts]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def _recompute_arguments(layout: Layout) -> dict[str, Any]:
    if layout.recompute == "none":
        return {}
    if layout.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    some = isinstance(layout.recompute, int)
    return {
        "recompute_granularity": "full",
        "recompute_method": "block" if some else "uniform",
        "recompute_num_layers": layout.recompute if some else 1,
    }
