"""Which projections have an adapter, its tensors and their first values, what a plan counts."""

from itertools import chain, product
from math import sqrt
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN as RENAMED

from tests.models.small import FAMILIES, section, tiny
from tests.plan.making import TINY, intent, recipe
from toolkit.errors import PlanError, RecipeError
from toolkit.layout import Layout
from toolkit.models import huggingface as hf
from toolkit.models.adapters.huggingface import inject, peft_config
from toolkit.models.adapters.lora import _KEPT_NAMES, Lora, spec_of
from toolkit.models.adapters.weights import AdaptedWeights, LoraWeights, fingerprint
from toolkit.models.families import mapped
from toolkit.models.families.tensors import Block, blocks
from toolkit.plan.cost.memory import stage_memory
from toolkit.plan.cost.stages import stage_share
from toolkit.plan.cost.workload import Workload
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import AdapterSection, Recipe

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
DENSE = [name for name in FAMILIES if not any("experts" in key for key in tiny(name))]

REFUSED = {
    *product(["mlp"], ["deepseek_v3", "glm4_moe", "llama4_text"]), ("experts", "llama4_text"),
}  # fmt: skip
"""What PEFT cannot adapt."""

WITHOUT_FILE = {
    "stablelm": {"num_key_value_heads": 4},
    "opt": {"word_embed_proj_dim": 32},
    "qwen3_5_text": {},
}


def lora(config: Any, **fields: Any) -> Lora:
    return Lora.of(AdapterSection(**{"rank": 4, "alpha": 8.0} | fields), config)


def config_of(family: str) -> dict[str, Any]:
    return hf.build_config(section(family)).to_dict()


def meta(family: str) -> Any:
    return hf.meta_model(hf.build_config(section(family)))


@pytest.mark.parametrize("family", [*DENSE, *WITHOUT_FILE])
def test_all_linear_is_what_peft_calls_so(family: str) -> None:
    """Also for types without a family file: an untied head (stablelm) has no adapter, a
    projection outside of the layers (opt) has one, the convolution of a module that is called
    linear (qwen3_5_text) has none."""
    config = hf.build_config(section(family, **WITHOUT_FILE.get(family, {})))
    transposed = family == "gpt2"
    peft = LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=transposed
    )
    theirs = {
        name.removeprefix("base_model.model.").replace(".default", ""): tuple(parameter.shape)
        for name, parameter in get_peft_model(hf.meta_model(config), peft).named_parameters()
        if "lora_" in name
    }
    assert lora(config.to_dict()).shapes == theirs


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", ["attention", "mlp", "experts"])
def test_injected_parameters_have_the_names_of_checkpoints(family: str, targets: str) -> None:
    if (targets, family) in REFUSED or (targets == "experts" and family in DENSE):
        return
    model, adapters = meta(family), lora(config_of(family), targets=targets)
    before = {name: tuple(p.shape) for name, p in hf.named_parameters(model)}
    assert adapters.transposed == (family == "gpt2")
    inject(model, adapters)
    after = {name: tuple(p.shape) for name, p in hf.named_parameters(model)}
    assert after == before | adapters.shapes
    trained = {name for name, p in hf.named_parameters(model) if p.requires_grad}
    assert trained == adapters.shapes.keys()


def test_what_peft_refuses_is_told() -> None:
    with pytest.raises(PlanError, match="PEFT does not adapt all-linear here"):
        inject(meta("mamba"), lora(config_of("mamba")))


def test_peft_reads_short_names_where_they_suffice() -> None:
    assert lora(TINY).short_targets == (
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    )  # fmt: skip
    # GPT-2 calls a projection of the attention and one of the MLP the same.
    gpt2 = lora(config_of("gpt2"), targets="attention")
    assert "transformer.h.0.attn.c_proj" in gpt2.short_targets


@pytest.mark.parametrize("targets", ["all-linear", ("v_proj", "gate_proj"), "experts"])
@pytest.mark.parametrize("degree", [1, 2])
def test_every_element_is_in_one_shard(targets: Any, degree: int) -> None:
    """The maps of megatron-core's tensors give each element of each adapter to one rank, or
    all of it to all, and the rows of B are those of the base's weight."""
    config = config_of("gpt_oss") if targets == "experts" else TINY
    adapters = lora(config, targets=targets)
    model = adapters.adapted(mapped(config))
    seen: dict[str, int] = dict.fromkeys(adapters.shapes, 0)
    for instance in model.instances():
        if ".lora." not in instance.tensor.name:
            continue
        ranks = range(1 if instance.tensor.split == "none" else degree)
        numbers = {"layer": instance.layer, "expert": instance.expert}
        shards = (blocks(instance.tensor, r, degree, **numbers) for r in ranks)
        for block in chain.from_iterable(shards):
            seen[block.tensor] += len(block.row_numbers) * len(block.column_numbers)
    assert seen == {name: shape[0] * shape[1] for name, shape in adapters.shapes.items()}
    for tensor in adapters.tensors if targets != "experts" else ():
        part_of_rows = adapters.part_of_rows(tensor, 0, degree if tensor.split == "rows" else 1)
        (up,) = (t for t in model.tensors if t.name == f"{tensor.name[:-6]}lora.up")
        rows = up.rows // (degree if up.split == "rows" else 1)
        assert sum(part is not None for part in part_of_rows) == rows


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [({}, 2.0), ({"rank": 16, "alpha": 4.0}, 0.25)],
)
def test_scaling(fields: Any, scaling: float) -> None:
    adapters = lora(TINY, **fields)
    assert adapters.scaling == scaling
    model = meta("llama")
    inject(model, lora(config_of("llama"), **fields))
    assert model.model.layers[0].self_attn.q_proj.scaling == {"default": scaling}
    assert isinstance(peft_config(adapters).lora_alpha, int)


def test_first_values_follow_from_seed_and_name() -> None:
    adapters = lora(TINY, rank=32)
    weights = LoraWeights(adapters, 7)
    down, up = (f"model.layers.1.mlp.down_proj.lora_{factor}.weight" for factor in "AB")
    whole = weights.read(down, 0, 32 * 128).view(32, 128)
    assert torch.equal(
        weights.read_block(Block(down, (3, 9), (5, 60), transposed=False)), whole[3:9, 5:60]
    )
    assert torch.equal(weights.read(down, 40, 99), whole.view(-1)[40:99])
    bound = 1 / sqrt(128)  # kaiming_uniform_(a=√5)
    assert whole.abs().max() <= bound
    assert whole.std().item() == pytest.approx(bound / sqrt(3), rel=0.05)
    assert not weights.read(up, 0, 64 * 32).any()
    assert not torch.equal(LoraWeights(adapters, 8).read(down, 0, 4096), whole.view(-1))
    other = weights.read(down.replace("1", "0"), 0, 4096)
    assert not torch.equal(other, whole.view(-1))


def test_a_fingerprint_tells_bases_apart() -> None:
    model = section("llama")
    config = hf.build_config(model)
    first, other = (hf.weight_source(model, config, seed) for seed in (1, 2))
    assert fingerprint(first) == fingerprint(hf.weight_source(model, config, 1))
    assert fingerprint(first) != fingerprint(other)
    own = LoraWeights(lora(config.to_dict()), 1)
    assert fingerprint(AdaptedWeights(first, own)) != fingerprint(first)


@pytest.mark.parametrize(
    ("family", "targets", "told"),
    [
        ("llama", ["q_proj", "qkv"], "found qkv, which is no projection of this model"),
        ("gpt2", ["q_proj"], "some of c_attn, c_fc, c_proj"),
        ("llama", ["attention", "experts"], "found experts, which is no projection"),
        ("llama4_text", ["experts"], "found experts, which is no projection"),
        ("qwen3_moe", ["up_proj"], "did you mean `?gate_up_proj"),
        ("glm4_moe", "all-linear", r"set adapter.targets to \[attention, experts\]"),
        ("llama", ["lm_head"], "found lm_head"),
    ],
)
def test_refused_targets(family: str, targets: Any, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        lora(config_of(family), targets=targets)


def test_experts_have_no_dropout_and_are_several() -> None:
    with pytest.raises(RecipeError, match=r"adapter\.dropout: found 0.1 with"):
        lora(config_of("mixtral"), targets="experts", dropout=0.1)
    alone = config_of("mixtral") | {"num_local_experts": 1, "num_experts_per_tok": 1}
    with pytest.raises(RecipeError, match="of which each layer of this model has one"):
        lora(alone, targets="experts")


def test_mixtures_whose_names_peft_keeps() -> None:
    mixtures = {name for name in FAMILIES if name not in DENSE}
    renamed = {name for name, of in RENAMED.items() if of == "qwen2_moe"}
    assert mixtures - renamed - {"mixtral"} == {*_KEPT_NAMES}


# What a plan counts


def adapted(targets: Any = "all-linear", **parallel: Any) -> Recipe:
    found = recipe(model__config=TINY).model_copy(update={"parallel": intent(**parallel)})
    wanted = AdapterSection(rank=4, alpha=8.0, targets=targets)
    return found.model_copy(update={"adapter": wanted})


def test_the_plan_counts_what_trains() -> None:
    plan = plan_recipe(adapted())
    own = sum(a * b for a, b in lora(TINY).shapes.values())
    assert plan.trainable_parameters == own
    assert plan.frozen_parameters == plan_recipe(recipe(model__config=TINY)).parameters


def test_memory_of_a_frozen_base() -> None:
    """Weights of both; gradients and optimizer states of the adapters alone."""
    spec = spec_of(TINY, (), None)
    adapted_spec = spec_of(TINY, (), AdapterSection(rank=4, alpha=8.0))
    own = adapted_spec.trainable
    layout = Layout()
    fields: dict[str, Any] = {"sequence_length": 32, "precision": "bf16", "engine": "deepspeed"}
    before = stage_memory(Workload(spec, model="hf", **fields), layout, 0)
    after = stage_memory(Workload(adapted_spec, model="hf", **fields), layout, 0)
    assert after["weights"] - before["weights"] == 2 * own
    assert (after["gradients"], after["optimizer"]) == (4 * own, 12 * own)


def test_tensor_parallel_splits_one_factor() -> None:
    """Column-parallel layers keep A whole; row-parallel ones keep B."""
    own = lora(TINY).parameters
    hidden, inner, rank = 64, 128, 4
    layers = TINY["num_hidden_layers"]
    whole = rank * (3 * hidden + hidden + 2 * hidden + hidden)  # A of q, k, v; B of o; …
    split = rank * (3 * hidden + hidden + 2 * inner + inner)
    assert (own.split, own.whole) == (layers * split, layers * whole)


def test_the_plan_counts_adapters_of_experts() -> None:
    """Each tensor rank has a part of B of gate and up and of A of down; an expert rank has all
    of its own experts'."""
    adapters = lora(config_of("mixtral"), targets="experts")
    layers = len(adapters.projections) // 2
    own, (first, *_, second) = adapters.parameters, adapters.projections
    each = adapters.section.rank * first.experts * layers
    assert own.experts_split == each * (first.outputs + second.inputs)
    assert own.experts_whole == each * (first.inputs + second.outputs)
    assert own.experts == sum(a * b for a, b in adapters.shapes.values())
    spec = spec_of(config_of("mixtral"), (), adapters.section)
    shares = [stage_share(spec, *degrees, 1, 1, 0).trained for degrees in ((2, 1), (1, 2))]
    assert shares[0].experts == own.experts_split / 2 + own.experts_whole
    assert shares[1].experts == own.experts / 2


def test_more_ranks_than_groups_need_all_of_qkv() -> None:
    few = TINY | {"num_key_value_heads": 2}
    wide: dict[str, Any] = {"engine": "megatron", "tensor": 4}
    made = recipe(model__config=few, cluster__gpus_per_node=4)
    job = made.model_copy(update={"parallel": intent(**wide)})
    for targets, refused in (("all-linear", False), (("q_proj", "v_proj"), True)):
        wanted = AdapterSection(rank=4, alpha=8.0, targets=targets)
        with_adapters = job.model_copy(update={"adapter": wanted})
        if not refused:
            assert plan_recipe(with_adapters).layout.tp == 4
            continue
        with pytest.raises(RecipeError, match="at most the 2 key/value heads where only some"):
            plan_recipe(with_adapters)
