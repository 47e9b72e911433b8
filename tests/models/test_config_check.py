"""check_config: the table of keys against transformers, and every kind of mistake."""

import dataclasses
import json
import os
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.configs import ROPES
from tests.work import calls
from toolkit.errors import Problem
from toolkit.models.config_check import check_config
from toolkit.models.config_keys import (
    ACTIVATION,
    FILE,
    GENERIC,
    LARGEST,
    LAYER_TYPES,
    ROPE_COMMON,
    ROPE_NEEDS,
    ROPE_READS,
)
from toolkit.models.families import FAMILIES, model_spec
from toolkit.models.families.llama_like import UNREAD


def transformers_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    rest = {key: value for key, value in config.items() if key != "model_type"}
    return AutoConfig.for_model(config["model_type"], **rest)


def small(model_type: str, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 48, "intermediate_size": 56, "vocab_size": 96}
    counts = {"num_hidden_layers": 3, "num_attention_heads": 4}
    return {"model_type": model_type, **sizes, **counts, **more}


GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 96}


# --- the table of keys ------------------------------------------------------------------


def table_of(cls: type) -> dict[str, Any]:
    """The fields of a config class: their defaults, and which may be null."""
    fields = dataclasses.fields(cls)
    defaults = {f.name: None if f.default is dataclasses.MISSING else f.default for f in fields}
    return {"defaults": defaults, "nullable": [f.name for f in fields if "None" in str(f.type)]}


def test_the_keys_are_the_fields_of_the_transformers_classes() -> None:
    classes = {name: type(AutoConfig.for_model(name)) for name in sorted(FAMILIES)}
    tables = {
        name: table_of(cls) for name, cls in ({"base": PreTrainedConfig} | classes).items()
    }
    if os.environ.get("DMT_UPDATE_GOLDEN"):
        FILE.write_text(json.dumps(tables, indent=1) + "\n")
    assert json.loads(FILE.read_text()) == tables


@pytest.mark.parametrize("model_type", FAMILIES)
def test_other_spellings_of_transformers_are_known(model_type: str) -> None:
    family = FAMILIES[model_type]
    map_ = type(AutoConfig.for_model(model_type)).attribute_map
    assert {*map_.keys(), *map_.values()} <= {*family.keys, *family.aliases}


EXAMPLES = {
    "architectures": ["X"], "dtype": "bfloat16", "torch_dtype": "bfloat16",
    "id2label": {"0": "a"}, "label2id": {"a": 0}, "problem_type": "regression",
    "transformers_version": "5.0",
    "rope_local_base_freq": 5000.0, "final_logit_softcapping": 30.0,
    "_sliding_window_pattern": 6,
    "_name_or_path": "x", "hidden_act": "gelu", "rope_theta": 5000, "head_dim": 64,
    "rope_scaling": {"type": "default", "rope_theta": 5000.0}, "cache_implementation": "hybrid",
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "n_inner": 64,
    "summary_activation": "tanh", "task_specific_params": {}, "mlp_only_layers": [1],
    "use_bidirectional_attention": False, "num_key_value_heads": 1, "pad_token_id": 1,
    "bos_token_id": 1, "eos_token_id": [1, 2], "sliding_window": 128, "n_ctx": 1024,
    "no_rope_layers": [1] * 36, "max_window_layers": 28, "initial_context_length": 4096,
    "experts_per_token": 4, "moe_layers": [1, 3], "for_llm_compressor": False,
}  # fmt: skip


EXAMPLES_OF: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": 128, "qk_head_dim": 192},
    "llama4_text": {"no_rope_layers": []},
}
BESIDES = {"glm4_moe": {"head_dim": 128}}
"""Keys without which a family's defaults do not fit together."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_known_key_is_accepted_by_transformers_and_by_us(model_type: str) -> None:
    for name, key in FAMILIES[model_type].keys.items():
        if name in ("model_type", "layer_types") or key.kind is UNREAD:
            continue
        examples = EXAMPLES | EXAMPLES_OF.get(model_type, {})
        value = deepcopy(examples.get(name, key.default))  # gpt_neox's class writes into maps
        if name == "rope_parameters" and FAMILIES[model_type].rope_bases:
            value = dict.fromkeys(FAMILIES[model_type].rope_bases, value)
        assert value is not None, f"{name} needs an example"
        config = {"model_type": model_type, **BESIDES.get(model_type, {}), name: value}
        assert check_config(config) == [], name
        transformers_config(config)


def test_activations_are_known_to_transformers_and_have_no_parameters() -> None:
    for name in ACTIVATION.allowed.removeprefix("one of ").split(", "):
        assert not list(ACT2FN[name].parameters())
    assert not ACTIVATION.accepts("prelu")
    assert LAYER_TYPES.accepts(["full_attention"])


@pytest.mark.parametrize("rope_type", ROPE_NEEDS)
def test_rotary_variants_run_in_transformers_and_need_what_we_say(rope_type: str) -> None:
    rope = {"rope_type": rope_type, **ROPES.get(rope_type, {})}
    config = small("llama", head_dim=8, max_position_embeddings=256, rope_scaling=rope)
    assert check_config(config) == []
    AutoModelForCausalLM.from_config(transformers_config(config))(torch.zeros(1, 4).long())
    for needed in ROPE_NEEDS[rope_type]:
        incomplete = {key: value for key, value in rope.items() if key != needed}
        (problem,) = check_config(config | {"rope_scaling": incomplete})
        assert needed in problem.found
    read = {*ROPE_NEEDS[rope_type], *ROPE_READS.get(rope_type, ())}
    assert read - {*ROPE_COMMON} == read_by_transformers(config) - {*ROPE_COMMON}
    unread = "beta_fast" if rope_type == "llama3" else "low_freq_factor"
    (problem,) = check_config(config | {"rope_scaling": rope | {unread: 1.0}})
    assert problem.key == f"rope_scaling.{unread}" and rope_type in problem.allowed


def read_by_transformers(config: dict[str, Any]) -> set[str]:
    """The keys of the rotary map that transformers looks up to compute frequencies."""
    seen: set[str] = set()

    class Recorded(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            seen.add(name)
            return super().__getitem__(name)

        def get(self, name: str, default: Any = None) -> Any:
            seen.add(name)
            return super().get(name, default)

    built = transformers_config(config)
    built.rope_parameters = Recorded(built.rope_parameters)
    compute = ROPE_INIT_FUNCTIONS.get(built.rope_parameters["rope_type"])
    if compute is not None:
        compute(built, seq_len=4)
    return seen


# --- mistakes ---------------------------------------------------------------------------


MISTAKES = {
    "no model_type": ({}, "model_type", "llama", "", "nothing"),
    "unknown model_type": (
        {"model_type": "lama"},
        "model_type",
        "gpt_neox",
        "`llama`",
        "'lama'",
    ),
    "odd model_type": ({"model_type": ["llama"]}, "model_type", "gpt2", "", "a list of 1"),
    "typo": (
        small("llama", hiden_size=3),
        "hiden_size",
        "llama config",
        "`hidden_size`",
        "unknown",
    ),
    "megatron name": (
        small("llama", num_query_groups=2),
        "num_query_groups",
        "llama config",
        "`num_key_value_heads`",
        "unknown",
    ),
    "foreign name in gpt2": (
        GPT2 | {"d_model": 2},
        "d_model",
        "gpt2 config",
        "`n_embd`",
        "unknown",
    ),
    "kv heads of gpt2": (
        GPT2 | {"num_key_value_heads": 2},
        "num_key_value_heads",
        "gpt2 config",
        "",
        "unknown",
    ),
    "number in quotes": (
        small("llama", head_dim="12"),
        "head_dim",
        "whole",
        "12 without",
        "'12'",
    ),
    "float for a size": (
        small("llama", head_dim=12.0),
        "head_dim",
        "whole",
        "write 12",
        "12.0",
    ),
    "int for a float": (small("llama", rms_norm_eps=1), "rms_norm_eps", "decimal", "1.0", "1"),
    "bool for a size": (small("llama", head_dim=True), "head_dim", "whole", "", "true"),
    "zero": (small("llama") | {"vocab_size": 0}, "vocab_size", "from 1", "", "0"),
    "negative": (small("llama") | {"hidden_size": -8}, "hidden_size", "from 1", "", "-8"),
    "huge": (small("llama") | {"hidden_size": 10**5000}, "hidden_size", "from 1", "", "bits"),
    "null": (small("llama") | {"hidden_size": None}, "hidden_size", "from 1", "", "null"),
    "nan": (small("llama", rms_norm_eps=float("nan")), "rms_norm_eps", "above 0", "", "nan"),
    "yes": (
        small("llama", tie_word_embeddings="yes"),
        "tie_word_embeddings",
        "true",
        "",
        "'yes'",
    ),
    "activation": (small("llama", hidden_act="swiglu"), "hidden_act", "silu", "", "swiglu"),
    "heads": (
        small("llama") | {"num_attention_heads": 5},
        "num_attention_heads",
        "48",
        "use 4",
        "5",
    ),
    "gpt2 heads": (GPT2 | {"n_head": 7}, "n_head", "n_embd (48)", "use 6", "7"),
    "kv heads": (
        small("llama", num_key_value_heads=3),
        "num_key_value_heads",
        "(4)",
        "use 2",
        "3",
    ),
    "more kv heads": (
        small("llama", num_key_value_heads=8),
        "num_key_value_heads",
        "4",
        "use 4",
        "8",
    ),
    "odd head size": (
        small("qwen3", head_dim=5, num_key_value_heads=4),
        "head_dim",
        "even",
        "",
        "5",
    ),
    "rotary share": (small("gpt_neox", rotary_pct=0.3), "rotary_pct", "even", "", "3 of 12"),
    "token beyond vocab": (small("llama", pad_token_id=96), "pad_token_id", "(96)", "", "96"),
    "padding token that is not stated": (
        small("smollm3", num_key_value_heads=2),
        "pad_token_id",
        "(96)",
        "state pad_token_id",
        "128004, the default",
    ),
    "layers without rotary": (
        small("smollm3", num_key_value_heads=2, pad_token_id=None, no_rope_layers=[1, 0]),
        "no_rope_layers",
        "one entry per layer",
        "",
        "2 entries",
    ),
    "scaling that phi3 does not have": (
        small("phi3", pad_token_id=None, rope_scaling={"rope_type": "linear", "factor": 2.0}),
        "rope_scaling.rope_type",
        "default, longrope",
        "",
        "linear",
    ),
    "experts": (
        small("mixtral", num_key_value_heads=2, num_experts_per_tok=9),
        "num_experts_per_tok",
        "num_local_experts (8)",
        "",
        "9",
    ),
    "experts under another family's name": (
        small("glm4_moe", num_key_value_heads=2, num_experts=8),
        "num_experts",
        "glm4_moe config",
        "`n_routed_experts`",
        "unknown",
    ),
    "uneven groups": (
        small("glm4_moe", num_key_value_heads=2, head_dim=16, n_routed_experts=8, n_group=3),
        "n_group",
        "a divisor of n_routed_experts (8)",
        "",
        "3",
    ),
    "groups of one": (
        small("glm4_moe", num_key_value_heads=2, head_dim=16, n_routed_experts=8, n_group=8),
        "n_group",
        "leaves 2 or more",
        "",
        "8",
    ),
    "groups to choose": (
        small(
            "glm4_moe",
            num_key_value_heads=2,
            head_dim=16,
            n_routed_experts=8,
            n_group=2,
            topk_group=3,
        ),
        "topk_group",
        "at most n_group (2)",
        "",
        "3",
    ),
    "experts of the groups": (
        small(
            "glm4_moe",
            num_key_value_heads=2,
            head_dim=16,
            n_routed_experts=16,
            n_group=4,
            num_experts_per_tok=8,
        ),
        "num_experts_per_tok",
        "at most the 4 experts",
        "",
        "8",
    ),
    "groups of latent attention": (
        small("deepseek_v3", num_key_value_heads=2),
        "num_key_value_heads",
        "num_attention_heads (4)",
        "use 4",
        "2",
    ),
    "odd turned share of latent heads": (
        small("deepseek_v3", num_key_value_heads=4, qk_rope_head_dim=7),
        "qk_rope_head_dim",
        "even",
        "",
        "7",
    ),
    "head size that latent attention does not read": (
        small("deepseek_v3", num_key_value_heads=4, head_dim=32),
        "head_dim",
        "64, which transformers computes",
        "remove it",
        "32",
    ),
    "dense layer": (
        small("qwen3_moe", num_key_value_heads=2, mlp_only_layers=[3]),
        "mlp_only_layers",
        "0 to 2",
        "",
        "layer 3",
    ),
    "layer types": (
        small("qwen2", num_key_value_heads=2, layer_types=["full_attention"]),
        "layer_types",
        "one entry per layer",
        "",
        "1 entries",
    ),
    "sliding layers, no window": (
        small("qwen2", num_key_value_heads=2, layer_types=["sliding_attention"] * 3),
        "use_sliding_window",
        "true",
        "",
        "false",
    ),
    "window on, no size": (
        small("qwen3", num_key_value_heads=4, use_sliding_window=True, sliding_window=None),
        "sliding_window",
        "a size",
        "",
        "null",
    ),
    "number as key": (small("llama") | {5: 1}, "5", "llama config", "", "unknown"),
    "two names": (
        small("mixtral", num_key_value_heads=2, num_experts=4, num_local_experts=4),
        "num_experts",
        "one name",
        "remove num_experts",
        "both",
    ),
    "n_ctx": (GPT2 | {"n_ctx": 77}, "n_ctx", "n_positions (1024)", "n_positions", "77"),
    "encoder": (GPT2 | {"is_encoder_decoder": True}, "is_encoder_decoder", "false", "", "true"),
    "cross attention": (
        GPT2 | {"add_cross_attention": True},
        "add_cross_attention",
        "false",
        "",
        "",
    ),
    "rope twice": (
        small("llama", rope_scaling={"factor": 2.0}, rope_parameters={"rope_theta": 1.0}),
        "rope_scaling",
        "one of them",
        "keep",
        "both",
    ),
    "rope disagrees": (
        small("llama", rope_theta=5.0, rope_parameters={"rope_theta": 6.0}),
        "rope_parameters.rope_theta",
        "one value",
        "remove one",
        "6.0",
    ),
    "rope typo": (
        small("llama", rope_scaling={"rope_type": "linear", "factor": 2.0, "factr": 1.0}),
        "rope_scaling.factr",
        "factor",
        "`factor`",
        "unknown",
    ),
    "rope type": (
        small("llama", rope_scaling={"rope_type": "llama4"}),
        "rope_scaling.rope_type",
        "llama3",
        "`llama3`",
        "llama4",
    ),
    "rope type not stated": (
        small("llama", rope_scaling={"factor": 2.0}),
        "rope_scaling.factor",
        "rope_type default reads",
        "name the rope_type",
        "2.0",
    ),
    "longrope with factors of other heads": (
        small(
            "llama",
            rope_scaling={
                "rope_type": "longrope",
                **ROPES["longrope"],
                "long_factor": [1.0] * 6,
            },
        ),
        "rope_scaling.short_factor",
        "6, one for every pair",
        "",
        "4 factors",
    ),
    "llama3 without a band": (
        small(
            "llama",
            rope_scaling={"rope_type": "llama3", **ROPES["llama3"], "low_freq_factor": 4.0},
        ),
        "rope_scaling.high_freq_factor",
        "no less than low_freq_factor (4.0)",
        "",
        "3.0",
    ),
    "share of a head that llama turns whole": (
        small("llama", rope_parameters={"partial_rotary_factor": 0.5}),
        "rope_parameters.partial_rotary_factor",
        "gpt_neox",
        "remove it",
        "0.5",
    ),
    "too many layers": (
        small("llama", num_hidden_layers=10**9),
        "num_hidden_layers",
        "to 10,000,",
        "",
        "1000000000",
    ),
    "too many positions under the family's own name": (
        GPT2 | {"n_positions": 2 * 10**9},
        "n_positions",
        "to 1,000,000,000,",
        "",
        "2000000000",
    ),
    "rope of all layers": (
        small("olmo3", pad_token_id=None, rope_parameters={"rope_theta": 5.0}),
        "rope_parameters.rope_theta",
        "full_attention and sliding_attention",
        "",
        "unknown",
    ),
    "rope of some layers": (
        small(
            "olmo3",
            pad_token_id=None,
            rope_parameters={"sliding_attention": {"rope_type": "yarn", "factor": 2.0}},
        ),
        "rope_parameters.sliding_attention",
        "original_max_position_embeddings",
        "",
        "yarn without",
    ),
    "rope incomplete": (
        small("llama", rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        "rope_scaling",
        "high_freq_factor",
        "",
        "low_freq_factor",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_problem_with_key_found_allowed_and_fix(name: str) -> None:
    config, key, allowed, fix, found = MISTAKES[name]
    (problem,) = check_config(config)
    assert problem.key == key
    assert allowed in problem.allowed
    assert fix in problem.fix
    assert found in problem.found


def test_all_mistakes_are_reported_together() -> None:
    config = small("llama", hiden_size=1, head_dim="x", num_key_value_heads=3, pad_token_id=500)
    keys = {problem.key for problem in check_config(config)}
    assert keys == {"hiden_size", "head_dim", "num_key_value_heads", "pad_token_id"}


HOSTILE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(10**300, 10**310),
    st.just(-(10**5000)), st.floats(), st.text(max_size=5), st.just("x" * 10**6),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=3)), max_size=4),
    st.dictionaries(st.one_of(st.text(max_size=8), st.integers()), st.integers(), max_size=3),
)  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_hostile_values_never_crash_and_what_is_accepted_is_counted(
    data: st.DataObject,
) -> None:
    model_type = data.draw(st.sampled_from(sorted(FAMILIES)))
    names = st.sampled_from(sorted({*FAMILIES[model_type].keys, *FAMILIES[model_type].aliases}))
    config = data.draw(
        st.dictionaries(st.one_of(names, st.text(max_size=4)), HOSTILE, max_size=6)
    )
    rope = {"rope_type": data.draw(HOSTILE), data.draw(st.text(max_size=5)): data.draw(HOSTILE)}
    if data.draw(st.booleans()):
        config["rope_scaling"] = rope
    config.setdefault("model_type", model_type)
    problems = check_config(config)
    assert all(len(str(problem)) < 1200 for problem in problems)
    if not problems:
        spec = model_spec(config)
        assert spec.parameters.total > 0
        assert spec.flops_per_token(7, causal=True) > 0


def test_thousands_of_unknown_keys() -> None:
    unknown = {f"hidden_{index}_size": 1 for index in range(9000)}
    config = small("llama", rope_scaling=unknown, **unknown)
    found: list[Problem] = []
    calls(lambda: found.extend(check_config(config)), 1_000_000)
    assert len(found) == 2 * 9000
    assert found[0].fix == "did you mean `hidden_size`?"


@pytest.mark.parametrize("key", LARGEST)
def test_every_size_has_a_largest(key: str) -> None:
    families = [one for one in FAMILIES.values() if one.name_of(key) in one.keys]
    assert families
    for family in families:
        name = family.name_of(key)
        config = {"model_type": family.model_type, name: LARGEST[key] + 1}
        assert name in {problem.key for problem in check_config(config)}


def test_generic_keys_are_in_every_family() -> None:
    for family in FAMILIES.values():
        assert set(GENERIC) <= set(family.keys)
