"""Families: their maps cover the real models; what Megatron cannot express is refused."""

from collections import defaultdict
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.configs import CONFIGS, LAYERS, ROPES, config_of, scaled
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


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("case", CONFIGS)
def test_blocks_partition_every_tensor_of_the_real_model(case: str, degree: int) -> None:
    config, shapes = config_of(case), checkpoint_shapes(case)
    times_read = {name: torch.zeros(shape, dtype=torch.int) for name, shape in shapes.items()}
    for instance in megatron_model(config).instances():
        ranks = 1 if instance.tensor.split == "none" else degree
        for rank in range(ranks):
            for block in blocks_of(instance, rank, degree):
                part = times_read[block.tensor][in_file(block)]
                sizes = [
                    len(range(index.start, index.stop, index.step or 1))
                    for index in in_file(block)
                ]
                assert list(part.shape) == sizes, f"{block} leaves {shapes[block.tensor]}"
                part += 1
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


@pytest.mark.parametrize("case", CONFIGS)
def test_shards_of_all_ranks_are_equally_large(case: str) -> None:
    """Megatron gives each rank the same shape; only the padded vocabulary's end is shorter."""
    for instance in megatron_model(config_of(case)).instances():
        tensor = instance.tensor
        if tensor.padded:
            continue
        sizes = defaultdict(set)
        for rank in range(4):
            found = blocks_of(instance, rank, 4)
            sizes["rows"].add(sum(len(block.row_numbers) for block in found))
            sizes["columns"] |= {
                None if block.columns is None else block.columns[1] - block.columns[0]
                for block in found
            }
        assert len(sizes["rows"]) == len(sizes["columns"]) == 1, tensor.name


def test_gqa_rank_holds_whole_head_groups_in_megatrons_order() -> None:
    config = config_of("llama")
    (qkv,) = (t for t in megatron_model(config).tensors if "linear_qkv" in t.name)
    found = [(b.tensor.split(".")[-2], b.rows) for b in blocks(qkv, 1, 2, layer=3)]
    assert found == [
        ("q_proj", (32, 48)), ("k_proj", (16, 24)), ("v_proj", (16, 24)),
        ("q_proj", (48, 64)), ("k_proj", (24, 32)), ("v_proj", (24, 32)),
    ]  # fmt: skip


def test_every_family_is_tried_here() -> None:
    assert FAMILIES.keys() == {case.split()[0] for case in CONFIGS}


@pytest.mark.parametrize("case", [case for case in CONFIGS if not case.startswith("gpt2")])
def test_rotary_settings_are_those_of_transformers(case: str) -> None:
    config = config_of(case)
    rope = AutoConfig.for_model(**config).rope_parameters
    rope = rope.get("full_attention", rope)
    gpt = megatron_model(config).gpt
    assert gpt["rotary_base"] == rope["rope_theta"]
    assert gpt["rotary_percent"] == rope.get("partial_rotary_factor", 1.0)


def test_rotary_settings_in_their_new_place() -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    gpt = megatron_model(config_of("gpt_neox", rope_parameters=rope)).gpt
    assert (gpt["rotary_base"], gpt["rotary_percent"]) == (5e5, 0.5)
    assert "rope_parameters" not in gpt, "megatron-core's own frequencies are these"


@pytest.mark.parametrize("rope_type", ROPES)
def test_scaled_rotary_settings_are_complete(rope_type: str) -> None:
    """What transformers makes of a config, under its old or its new name."""
    config = config_of("llama", rope_theta=5e5, **scaled(rope_type))
    theirs = AutoConfig.for_model(**deepcopy(config)).rope_parameters  # it writes into the map
    gpt = megatron_model(config).gpt
    share = theirs.get("partial_rotary_factor", 1.0)
    assert gpt["rope_parameters"] == theirs | {"partial_rotary_factor": share}
    assert (gpt["rotary_base"], gpt["rotary_percent"]) == (5e5, 1.0)
    old = {"rope_scaling": {"type": rope_type, **ROPES[rope_type]}, "rope_parameters": None}
    assert megatron_model({**config, **old}).gpt == gpt
    saved = AutoConfig.for_model(**deepcopy(config)).to_dict()
    assert check_config(saved) == [] and megatron_model(saved).gpt == gpt


def test_original_length_of_phi3_stands_beside_the_map_and_takes_precedence() -> None:
    rope = {**ROPES["longrope"], "rope_type": "longrope"}
    config = config_of("phi3", original_max_position_embeddings=20, rope_scaling=rope)
    theirs = AutoConfig.for_model(**deepcopy(config)).rope_parameters
    assert theirs["original_max_position_embeddings"] == 20
    assert megatron_model(config).gpt["rope_parameters"] == theirs


@pytest.mark.parametrize(
    ("case", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 8}, [1, 1, 1, 1]),
        ("mistral", {"sliding_window": None}, None),
        ("mixtral", {"sliding_window": 8}, [1, 1, 1, 1]),
        ("qwen2", {"sliding_window": 8}, None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}, [0, 0, 0, 1]),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 4}, None),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [1, 0, 1, 0],
        ),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, [1, 1, 1, 1]),
    ],
)
def test_sliding_layers(case: str, changes: dict[str, Any], windows: list[int] | None) -> None:
    fields = megatron_model(config_of(case, **changes)).transformer
    if windows is None:
        assert "window_size" not in fields
        return
    assert fields["window_size"] == (changes.get("sliding_window", 4096) - 1, 0)
    assert fields.get("window_attn_skip_freq", [1] * LAYERS) == windows


def test_dropout_is_what_the_config_states_and_otherwise_none() -> None:
    silent = megatron_model(config_of("gpt2")).transformer
    assert (silent["attention_dropout"], silent["hidden_dropout"]) == (0.0, 0.0)
    stated = config_of("gpt2", attn_pdrop=0.1, resid_pdrop=0.2, embd_pdrop=0.2)
    fields = megatron_model(stated).transformer
    assert (fields["attention_dropout"], fields["hidden_dropout"]) == (0.1, 0.2)
    neox = config_of("gpt_neox", attention_dropout=0.3, hidden_dropout=0.4)
    fields = megatron_model(neox).transformer
    assert (fields["attention_dropout"], fields["hidden_dropout"]) == (0.3, 0.4)


def test_layers_with_experts() -> None:
    partly = megatron_model(config_of("qwen3_moe partly dense"))
    assert partly.moe_layers == {3}
    assert partly.transformer["moe_layer_freq"] == [0, 0, 0, 1]
    assert megatron_model(config_of("mixtral")).moe_layers == {0, 1, 2, 3}
    none = megatron_model(config_of("qwen3_moe", decoder_sparse_step=5))
    assert not none.moe_layers and "num_moe_experts" not in none.transformer


def test_router_normalises_as_transformers_does() -> None:
    key = "moe_router_pre_softmax"
    assert not megatron_model(config_of("mixtral")).transformer[key]
    assert megatron_model(config_of("qwen3_moe")).transformer[key]
    assert not megatron_model(config_of("qwen3_moe", norm_topk_prob=True)).transformer[key]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize("case", CONFIGS)
def test_plain_configs_are_supported(case: str) -> None:
    assert unsupported(config_of(case)) is None


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
        (
            "deepseek_v3",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_type linear",
        ),
        ("deepseek_v3", {"rope_scaling": YARN}, None),
        ("deepseek_v3", {"rope_scaling": YARN | {"mscale": 0.7}}, "both mscale"),
        ("deepseek_v3", {"rope_scaling": YARN | {"truncate": False}}, "truncate"),
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


@pytest.mark.parametrize(("stated", "frozen"), [(7, 7), (-1, 99), (None, None)])
def test_padding_token_counts_from_the_end_as_in_torch(
    stated: int | None, frozen: int | None
) -> None:
    config = {"model_type": "llama", "vocab_size": 100, "pad_token_id": stated}
    assert megatron_model(config).padding_token == frozen
