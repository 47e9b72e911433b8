"""Families: their maps cover the real models; what Megatron cannot express is refused."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.configs import CONFIGS, config_of
from toolkit.errors import PlanError
from toolkit.models.families import FAMILIES, megatron_model, unsupported
from toolkit.models.families.base import Instance
from toolkit.models.families.tensors import Block, blocks
from toolkit.models.huggingface import named_parameters
from toolkit.models.model import check_config
from toolkit.models.weights import checkpoint_names


@cache
def real_model(case: str) -> torch.nn.Module:
    """transformers' model of a case, without storage."""
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config_of(case))
        )
    return model


def checkpoint_shapes(case: str) -> dict[str, tuple[int, ...]]:
    """Every checkpoint tensor of the real transformers model."""
    return {
        piece.name: piece.shape
        for name, parameter in named_parameters(real_model(case))
        for piece in checkpoint_names(name, parameter.shape)
    }


def blocks_of(instance: Instance, rank: int, degree: int) -> list[Block]:
    """What one rank holds of one Megatron tensor."""
    return blocks(instance.tensor, rank, degree, layer=instance.layer, expert=instance.expert)


def in_file(block: Block) -> tuple[slice, ...]:
    """The block as an index into the checkpoint tensor."""
    if block.columns is None:
        return (slice(*block.rows, block.steps[0]),)
    index = slice(*block.rows, block.steps[0]), slice(*block.columns)
    return index[::-1] if block.transposed else index


@pytest.mark.parametrize("case", CONFIGS)
def test_blocks_partition_every_tensor_of_the_real_model(case: str) -> None:
    """Of two ranks; both have the same shape, but for the end of the padded vocabulary."""
    config, shapes = config_of(case), checkpoint_shapes(case)
    assert unsupported(config) is None
    times_read = {name: torch.zeros(shape, dtype=torch.int) for name, shape in shapes.items()}
    for instance in megatron_model(config).instances():
        elements = set()
        for rank in range(1 if instance.tensor.split == "none" else 2):
            found = blocks_of(instance, rank, 2)
            elements.add(sum(len(one.row_numbers) * len(one.column_numbers) for one in found))
            for block in found:
                part = times_read[block.tensor][in_file(block)]
                assert part.numel() == len(block.row_numbers) * len(block.column_numbers)
                part += 1
        assert len(elements) == 1 or instance.tensor.padded, instance
    wrong = [name for name, times in times_read.items() if not bool((times == 1).all())]
    assert not wrong


@pytest.mark.parametrize("case", CONFIGS)
def test_buffers_are_those_that_the_real_model_saves(case: str) -> None:
    model = real_model(case)
    saved = {
        name: (buffer.shape[0],)
        for name, buffer in model.named_buffers()
        if name in model.state_dict()
    }
    ours = megatron_model(config_of(case))
    found = [one for one in ours.instances(buffers=True) if one.tensor in ours.buffers]
    whole = [block for one in found for block in blocks_of(one, 0, 1)]
    assert {block.tensor: block.rows[1:] for block in whole} == saved


def test_every_family_is_tried_here() -> None:
    assert FAMILIES.keys() == {case.split()[0] for case in CONFIGS}


def test_dropout_is_what_the_config_states_and_otherwise_none() -> None:
    silent = megatron_model(config_of("gpt2")).transformer
    assert (silent["attention_dropout"], silent["hidden_dropout"]) == (0.0, 0.0)
    stated = config_of("gpt2", attn_pdrop=0.1, resid_pdrop=0.2, embd_pdrop=0.2)
    fields = megatron_model(stated).transformer
    assert (fields["attention_dropout"], fields["hidden_dropout"]) == (0.1, 0.2)
    neox = config_of("gpt_neox", attention_dropout=0.3, hidden_dropout=0.4)
    fields = megatron_model(neox).transformer
    assert (fields["attention_dropout"], fields["hidden_dropout"]) == (0.3, 0.4)


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ("llama", {"attention_bias": True}, "bias"),
        ("llama", {"mlp_bias": True}, "bias"),
        ("llama", {"hidden_act": "relu"}, "relu"),
        ("qwen3", {"attention_bias": True}, "bias"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse layer"),
        ("gpt2", {"resid_pdrop": 0.1}, "embd_pdrop must equal resid_pdrop"),
        ("gpt2", {"scale_attn_weights": False}, None),
        ("gpt2", {"activation_function": "quick_gelu"}, "quick_gelu"),
        ("gpt_neox", {"attention_bias": False}, "bias"),
        ("gpt_neox", {"use_parallel_residual": False}, None),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "eps"),
        ("deepseek_v3", {"attention_bias": True}, "no biases"),
        ("deepseek_v3", {"rope_interleave": False}, "interleaved pairs"),
        ("deepseek_v3", {"first_k_dense_replace": 4}, "without experts"),
        ("glm4_moe", {"norm_topk_prob": False}, "normalises the sigmoid scores"),
        ("glm4_moe", {"num_experts_per_tok": 1}, "normalises the sigmoid scores"),
        (
            "glm4_moe",
            {"num_experts_per_tok": 1, "norm_topk_prob": False, "topk_group": 4},
            None,
        ),
        ("glm4_moe", {"num_experts_per_tok": 3}, "by their best two"),
        ("glm4_moe", {"num_experts_per_tok": 3, "topk_group": 4}, None),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("mixtral", {"num_experts_per_tok": 1}, "one expert per token"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, None),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "one expert"),
    ],
)
def test_what_megatron_cannot_compute_is_refused(
    case: str, changes: dict[str, Any], reason: str | None
) -> None:
    found = unsupported(config_of(case, **changes))
    assert found is None if reason is None else found is not None and reason in found


def test_an_unsupported_model_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanError, match="relu"):
        megatron_model(config_of("gemma2", hidden_activation="relu"))


@pytest.mark.parametrize("case", CONFIGS)
def test_config_that_transformers_saves_is_understood(case: str) -> None:
    """A saved config states every key, some in other places than a hand-written one."""
    config = config_of(case)
    saved = AutoConfig.for_model(**config).to_dict()
    assert check_config(saved) == []
    ours, theirs = megatron_model(config), megatron_model(saved)
    assert ours.gpt == theirs.gpt and ours.tensors == theirs.tensors
    without = {"attention_dropout", "hidden_dropout"}  # stated there, with gpt2's defaults
    assert {k: v for k, v in ours.transformer.items() if k not in without} == {
        k: v for k, v in theirs.transformer.items() if k not in without
    }


@pytest.mark.parametrize("case", CONFIGS)
def test_padding_tokens_embedding_trains_where_transformers_trains_it(case: str) -> None:
    config = config_of(case, pad_token_id=7)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    frozen = model.get_input_embeddings().padding_idx
    assert megatron_model(config).padding_token == frozen
