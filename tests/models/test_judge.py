"""Mistakes in a config, as transformers' own classes find them."""

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.configs import ROPES, config_of
from tests.work import calls
from toolkit.errors import Problem
from toolkit.models.families import FAMILIES, model_spec
from toolkit.models.judge import known_keys
from toolkit.models.model import check_config, published


def small(model_type: str, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 48, "intermediate_size": 56, "vocab_size": 96}
    counts = {"num_hidden_layers": 3, "num_attention_heads": 4}
    return {"model_type": model_type, **sizes, **counts, **more}


GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 96}


MISTAKES = """
typo: [llama, {hiden_size: 3}, hiden_size, "`hidden_size`"]
megatron name: [llama, {num_query_groups: 2}, num_query_groups, "`num_key_value_heads`"]
foreign name in gpt2: [gpt2, {d_model: 2}, d_model, "`n_embd`"]
kv heads of gpt2: [gpt2, {num_key_value_heads: 2}, num_key_value_heads]
number in quotes: [llama, {head_dim: "12"}, head_dim]
float for a size: [llama, {head_dim: 12.0}, head_dim]
int for a float: [llama, {rms_norm_eps: 1}, rms_norm_eps]
bool for a size: [llama, {head_dim: true}, head_dim]
zero: [llama, {vocab_size: 0}, vocab_size]
negative: [llama, {hidden_size: -8}, hidden_size]
no value: [llama, {hidden_size: null}, hidden_size]
not finite: [llama, {rms_norm_eps: .nan}, rms_norm_eps]
yes in quotes: [llama, {tie_word_embeddings: "yes"}, tie_word_embeddings]
activation: [llama, {hidden_act: swiglu}, hidden_act]
heads: [llama, {num_attention_heads: 5}, num_attention_heads]
gpt2 heads: [gpt2, {n_head: 7}, n_head]
kv heads: [llama, {num_key_value_heads: 3}, num_key_value_heads]
more kv heads: [llama, {num_key_value_heads: 8}, num_key_value_heads]
odd head size: [qwen3, {head_dim: 5, num_key_value_heads: 4}, head_dim]
token beyond vocab: [llama, {pad_token_id: 96}, pad_token_id]
padding token that is not stated: [smollm3, {num_key_value_heads: 2}, model_type]
layers without rotary:
  [smollm3, {num_key_value_heads: 2, pad_token_id: null, no_rope_layers: [1, 0]}, model_type]
scaling that phi3 does not have:
  [phi3, {pad_token_id: null, rope_scaling: {rope_type: linear, factor: 2.0}}, rope_scaling]
experts: [mixtral, {num_key_value_heads: 2, num_experts_per_tok: 9}, model_type]
experts under another family's name:
  [glm4_moe, {num_key_value_heads: 2, num_experts: 8}, num_experts]
uneven groups: [glm4_moe, {<<: *groups, n_group: 3}, model_type]
groups of one: [glm4_moe, {<<: *groups, n_group: 8}, model_type]
groups to choose: [glm4_moe, {<<: *groups, n_group: 2, topk_group: 3}, model_type]
groups of latent attention: [deepseek_v3, {num_key_value_heads: 2}, model_type]
odd turned share of latent heads:
  [deepseek_v3, {num_key_value_heads: 4, qk_rope_head_dim: 7}, model_type]
head size that latent attention does not read:
  [deepseek_v3, {num_key_value_heads: 4, head_dim: 32}, model_type]
dense layer: [qwen3_moe, {num_key_value_heads: 2, mlp_only_layers: [3]}, mlp_only_layers]
layer types:
  [qwen2, {num_key_value_heads: 2, layer_types: [full_attention]}, num_hidden_layers]
sliding layers, no window:
  - qwen2
  - {num_key_value_heads: 2, num_hidden_layers: 1, layer_types: [sliding_attention]}
  - model_type
window on, no size:
  - qwen3
  - {num_key_value_heads: 4, use_sliding_window: true, sliding_window: null}
  - sliding_window
number as key: [llama, {5: 1}, "5"]
two names:
  - mixtral
  - {num_key_value_heads: 2, num_experts: 4, num_local_experts: 4}
  - num_experts
  - remove num_experts
n_ctx: [gpt2, {n_ctx: 77}, n_ctx]
encoder: [gpt2, {is_encoder_decoder: true}, is_encoder_decoder]
cross attention: [gpt2, {add_cross_attention: true}, add_cross_attention]
rope twice:
  [llama, {rope_scaling: {factor: 2.0}, rope_parameters: {rope_theta: 1.0}}, rope_parameters]
base of rope: [llama, {rope_theta: 0}, rope_theta]
rope disagrees: [llama, {rope_theta: 5.0, rope_parameters: {rope_theta: 6.0}}, rope_theta]
rope typo:
  [llama, {rope_scaling: {rope_type: linear, factor: 2.0, factr: 1.0}}, rope_scaling]
rope type: [llama, {rope_scaling: {rope_type: llama4}}, rope_scaling]
rope type not stated: [llama, {rope_scaling: {factor: 2.0}}, rope_scaling]
share of a head that llama turns whole:
  [llama, {rope_parameters: {partial_rotary_factor: 0.5}}, rope_parameters]
too many layers: [llama, {num_hidden_layers: 1000000000}, num_hidden_layers]
too many positions under the family's own name: [gpt2, {n_positions: 2000000000}, n_positions]
rope incomplete: [llama, {rope_scaling: {rope_type: llama3, factor: 8.0}}, rope_scaling]
type without initial decoder: [bert, {}, is_decoder, "add is_decoder: true"]
"""
"""model_type, keys, the key that the problem names, and words of its fix."""
GROUPS = "&groups {num_key_value_heads: 2, head_dim: 16, n_routed_experts: 8}"


def mistakes() -> dict[str, tuple[dict[str, Any], str, str]]:
    """Configs of `MISTAKES`, and those that YAML cannot state or that have no sizes."""
    rows = yaml.safe_load(f"groups: {GROUPS}{MISTAKES}")
    del rows["groups"]
    found = {}
    for name, (model_type, changes, key, *fix) in rows.items():
        base = GPT2 if model_type == "gpt2" else small(model_type)
        found[name] = {**base, **changes}, key, "".join(fix)
    longrope = {"rope_type": "longrope", **ROPES["longrope"], "long_factor": [1.0] * 6}
    return found | {
        "no model_type": ({}, "model_type", ""),
        "unknown model_type": ({"model_type": "lama"}, "model_type", "`llama`"),
        "odd model_type": ({"model_type": ["llama"]}, "model_type", ""),
        "images": ({"model_type": "gemma3"}, "model_type", "text_config"),
        "huge": (small("llama") | {"hidden_size": 10**5000}, "hidden_size", ""),
        "longrope of other heads": (small("llama", rope_scaling=longrope), "model_type", ""),
    }


@pytest.mark.parametrize(("config", "key", "fix"), mistakes().values(), ids=mistakes())
def test_a_mistake_is_one_problem_with_key_found_allowed_and_fix(
    config: dict[str, Any], key: str, fix: str
) -> None:
    (problem,) = check_config(config)
    assert problem.key == key
    assert problem.found and problem.allowed and fix in problem.fix


LLAMA3 = {"rope_type": "llama3", **ROPES["llama3"], "low_freq_factor": 4.0}
MANY = {"head_dim": 16, "n_routed_experts": 16, "n_group": 4, "num_experts_per_tok": 8}
SOME = {"sliding_attention": {"rope_type": "yarn", "factor": 2.0}}


@pytest.mark.parametrize(
    "config",
    [
        small("llama", rope_scaling=LLAMA3, max_position_embeddings=64),  # without a band
        small("glm4_moe", num_key_value_heads=2, **MANY),
        small("olmo3", pad_token_id=None, rope_parameters={"rope_theta": 5.0}),
        small("olmo3", pad_token_id=None, rope_parameters=SOME),
        small(
            "gpt_neox", rotary_pct=0.3
        ),  # an odd number, of which transformers turns one more
    ],
)
def test_a_config_that_transformers_computes_is_taken(config: dict[str, Any]) -> None:
    assert check_config(config) == []
    assert model_spec(config).total > 0


def test_all_mistakes_are_reported_together() -> None:
    config = small("llama", hiden_size=1, head_dim="x", num_key_value_heads=3)
    keys = {problem.key for problem in check_config(config)}
    assert keys == {"hiden_size", "head_dim", "num_key_value_heads"}


def test_keys_that_tools_add_to_a_published_config_are_left_out() -> None:
    """Of unsloth, peft, vLLM and older releases of transformers."""
    added = {
        "unsloth_fixed": True, "_attn_implementation_autoset": True, "auto_map": {},
        "attn_implementation": "flash_attention_2", "tokenizer_class": "x", "is_decoder": False,
        "pruned_heads": {}, "torchscript": False, "max_length": 20, "unsloth_version": "1",
    }  # fmt: skip
    for case in ("llama", "gpt2", "mixtral"):
        assert check_config(published(config_of(case) | added)) == []


HOSTILE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(10**300, 10**310),
    st.just(-(10**5000)), st.floats(), st.text(max_size=5), st.just("x" * 10**6),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=3)), max_size=4),
    st.dictionaries(st.one_of(st.text(max_size=8), st.integers()), st.integers(), max_size=3),
)  # fmt: skip


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_hostile_values_never_crash_and_what_is_accepted_is_counted(
    data: st.DataObject,
) -> None:
    model_type = data.draw(st.sampled_from(sorted(FAMILIES)))
    names = st.sampled_from(sorted(known_keys(model_type)))
    config = data.draw(
        st.dictionaries(st.one_of(names, st.text(max_size=4)), HOSTILE, max_size=6)
    )
    rope = {"rope_type": data.draw(HOSTILE), data.draw(st.text(max_size=5)): data.draw(HOSTILE)}
    if data.draw(st.booleans()):
        config["rope_scaling"] = rope
    config.setdefault("model_type", model_type)
    config.setdefault("num_hidden_layers", 2)
    problems = check_config(config)
    assert all(len(str(problem)) < 1200 for problem in problems)
    if not problems:
        assert model_spec(config).flops_per_token(7, causal=True) > 0


def test_thousands_of_unknown_keys() -> None:
    unknown = {f"hidden_{index}_size": 1 for index in range(9000)}
    found: list[Problem] = []
    calls(lambda: found.extend(check_config(small("llama", **unknown))), 2_000_000)
    assert len(found) == 9000
    assert found[0].fix == "did you mean `hidden_size`?"
