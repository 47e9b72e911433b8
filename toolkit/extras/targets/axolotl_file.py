"""Axolotl's YAML from a recipe and its plan."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolkit.errors import Problem
from toolkit.extras.targets.finetuning import FinetuningTarget
from toolkit.extras.targets.values import written_rows
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import (
    ChatSource,
    ColumnName,
    DocumentSource,
    DpoSection,
    HfSource,
    OrpoSection,
    PreferenceSource,
    Recipe,
)
from toolkit.targets.options import read_options

RL = {"dpo": ("dpo", "sigmoid"), "ipo": ("dpo", "ipo"), "orpo": ("orpo", None)}
"""`rl`: our objective and its loss."""
_LOSSES = {loss: name for name, (_, loss) in RL.items()}
RINGS = {"varlen_llama3": "all_gather", "batch_ring": "ring"}
LIGER = ("liger_rope", "liger_rms_norm", "liger_glu_activation")
FIELDS: Mapping[str, ColumnName] = {
    "field_messages": "prompt",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
}
"""Of preferences: our columns."""

LORA = {
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lora_model_dir": "folder",
    "peft_use_rslora": "rslora",
}
"""Its names of the settings of `adapter`."""
OPTIONS = read_options("axolotl", __file__)
_NAMES = {
    "per_device_train_batch_size": "micro_batch_size",
    "num_train_epochs": "num_epochs",
    "optim": "optimizer",
    "lr_scheduler_type": "lr_scheduler",
}
"""Its names of TrainingArguments, where they are others."""
_SPLITS = {"datasets": "data.train", "test_datasets": "data.validation"}


def problems(target: FinetuningTarget, recipe: Recipe, plan: Plan) -> Iterator[Problem]:
    """What Axolotl cannot express."""
    data, kernels, schedule = recipe.data, recipe.kernels, recipe.schedule
    if data.kind == "hf" and data.packing != "best_fit":
        yield target.problem("data.packing", data.packing, "best_fit")
    if data.kind == "hf" and not data.isolate_documents:
        yield target.problem("data.isolate_documents", False, True)
    if not schedule.warmup_steps and not schedule.warmup_ratio:
        yield target.problem("schedule.warmup_steps", 0, 2)
    if recipe.model.init == "random":
        yield target.problem("model.init", "random", "pretrained")
    if plan.layout.cp > 1 and kernels.context not in ("auto", *RINGS.values()):
        yield target.problem("kernels.context", kernels.context, "auto")
    yield from target.source_problems(recipe)
    for key, source in data.named_sources:
        if isinstance(source, ChatSource) and source.loss_on not in ("assistant", "all"):
            yield target.problem(f"{key}.loss_on", source.loss_on, "assistant")
    if len(longer := _too_long(recipe)) > 1 or "split" in longer:
        yield target.problem("data.train.too_long", ", ".join(sorted(longer)), "drop")
    section = recipe.dpo or DpoSection()
    if recipe.training.objective == "dpo":
        if section.loss not in _LOSSES:
            yield target.problem("dpo.loss", section.loss, "sigmoid")
        if section.sft_weight:
            yield target.problem("dpo.sft_weight", section.sft_weight, 0)


def values(
    target: FinetuningTarget, recipe: Recipe, plan: Plan
) -> tuple[dict[str, Any], Sequence[str]]:
    """The file as plain data, and notes."""
    data, kernels, schedule, model = recipe.data, recipe.kernels, recipe.schedule, recipe.model
    datasets = {
        name: [_dataset(source) for key, source in data.named_sources if key.startswith(side)]
        for name, side in _SPLITS.items()
    }
    trainer = target.trainer(recipe, plan)
    if trainer.pop("fsdp", None):
        trainer |= {"fsdp_version": 2, "fsdp_config": _fsdp(trainer["fsdp_config"])}
    found: dict[str, Any] = {
        **dict(written_rows(OPTIONS.rows, recipe, plan)),
        "base_model": model.hub,
        **({"revision_of_model": model.revision} if model.revision else {}),
        "val_set_size": data.validation_fraction,
        **{_NAMES.get(name, name): value for name, value in trainer.items()},
        **{name: listed for name, listed in datasets.items() if listed},
        **_adapter(recipe),
        **_pairs(recipe),
        "sample_packing": data.packing != "none",
        "output_dir": f"outputs/{recipe.name}",
    }
    for word in _too_long(recipe):
        found["excess_length_strategy"] = word
    if data.kind != "hf":
        jinja = data.chat_template not in (None, "chatml")
        name = "chat_template_jinja" if jinja else "chat_template"
        found[name] = data.chat_template or "tokenizer_default"
    if "liger" in (kernels.fused, kernels.loss):
        found["plugins"] = ["axolotl.integrations.liger.LigerPlugin"]
        found |= dict.fromkeys(LIGER, kernels.fused == "liger")
        found["liger_fused_linear_cross_entropy"] = kernels.loss == "liger"
    if kernels.mlp == "tiled":
        found["tiled_mlp"] = True
    if plan.layout.cp > 1:
        rings = {ours: theirs for theirs, ours in RINGS.items()}
        found["context_parallel_size"] = plan.layout.cp
        found |= {"ring_attn_func": rings[kernels.context]} if kernels.context in rings else {}
    if schedule.min_learning_rate:
        share = schedule.min_learning_rate / recipe.optimizer.learning_rate
        found["cosine_min_lr_ratio"] = share
    alpaca = any(isinstance(one, ChatSource) and one.format == "alpaca" for one in data.sources)
    notes = ["`type: alpaca` has a prompt of its own, not the chat template"]
    return found, notes if alpaca else ()


def _too_long(recipe: Recipe) -> set[str]:
    """What becomes of longer rows, which is the same in all data sets there."""
    sources = recipe.data.sources
    return {str(one.too_long) for one in sources if not isinstance(one, DocumentSource)}


def _adapter(recipe: Recipe) -> dict[str, object]:
    if (adapter := recipe.adapter) is None:
        return {}
    stated = {theirs: getattr(adapter, ours) for theirs, ours in LORA.items()}
    found = {name: value for name, value in stated.items() if value is not None}
    found |= {"adapter": "lora"}
    if adapter.init == "gaussian":
        found["peft_init_lora_weights"] = adapter.init
    if adapter.targets == "all-linear":
        return {**found, "lora_target_linear": True}
    return {**found, "lora_target_modules": list(adapter.targets)}


def _pairs(recipe: Recipe) -> dict[str, object]:
    """The objective on pairs, and its weight."""
    if recipe.training.objective == "orpo":
        return {"rl": "orpo", "orpo_alpha": (recipe.orpo or OrpoSection()).beta}
    if recipe.training.objective != "dpo":
        return {}
    section = recipe.dpo or DpoSection()
    smoothing = section.label_smoothing
    found = {"rl": _LOSSES[section.loss], "rl_beta": section.beta}
    return found | ({"dpo_label_smoothing": smoothing} if smoothing else {})


def _dataset(source: Any) -> dict[str, object]:
    """An entry of `datasets`."""
    names = ("path", "name", "split", "revision")
    entry: dict[str, object] = {
        name: value for name in names if (value := getattr(source, name)) is not None
    }
    if isinstance(source, HfSource):
        return {**entry, "type": "completion", "field": source.text_field}
    if isinstance(source, PreferenceSource):
        fields = {theirs: source.column(ours) for theirs, ours in FIELDS.items()}
        return {**entry, "type": "chat_template.default", **fields}
    if source.loss_on == "all":
        entry["roles_to_train"] = ["system", "user", "assistant", "tool"]
    if source.format == "alpaca":
        return {**entry, "type": "alpaca"}
    entry["type"] = "chat_template"
    if source.format == "messages":
        return {**entry, "field_messages": source.column("messages")}
    mapped = {"role": "from", "content": "value"}
    column = source.column("conversations")
    return {**entry, "field_messages": column, "message_property_mappings": mapped}


def _fsdp(config: Mapping[str, object]) -> dict[str, object]:
    """The Trainer's words for FSDP 2 in Accelerate's."""
    names = {"cpu_offload": "offload_params"}
    return {names.get(name, name): value for name, value in config.items() if name != "version"}
