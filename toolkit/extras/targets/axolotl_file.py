"""Axolotl's YAML from a recipe and its plan."""

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.extras.targets.finetuning import FinetuningTarget
from toolkit.extras.targets.values import read_options, written_rows
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
from toolkit.targets.base import Row

RL = {"dpo": ("dpo", "sigmoid"), "ipo": ("dpo", "ipo"), "orpo": ("orpo", None)}
"""`rl`: our objective and its loss."""
RINGS = {"varlen_llama3": "all_gather", "batch_ring": "ring"}
LIGER = ("liger_rope", "liger_rms_norm", "liger_glu_activation")
FIELDS: Mapping[str, ColumnName] = {
    "field_messages": "prompt",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
}
"""Of preferences: our columns."""

OPTIONS = read_options("axolotl")
_KEYS: Mapping[str, Row] = {
    **OPTIONS.rows,
    "base_model": "model.hub",
    "revision_of_model": "model.revision",
    "val_set_size": "data.validation_fraction",
    "lora_r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_model_dir": "adapter.folder",
    "peft_use_rslora": "adapter.rslora",
}
_NAMES = {
    "per_device_train_batch_size": "micro_batch_size",
    "num_train_epochs": "num_epochs",
    "optim": "optimizer",
    "lr_scheduler_type": "lr_scheduler",
}
"""Its names of TrainingArguments, where they are others."""
_SPLITS = {"datasets": "data.train", "test_datasets": "data.validation"}


def values(
    target: FinetuningTarget, recipe: Recipe, plan: Plan
) -> tuple[dict[str, object], Sequence[str]]:
    """The file as plain data, and notes. Raises PlanError naming what it cannot express."""
    data, kernels, schedule = recipe.data, recipe.kernels, recipe.schedule
    packed = data.packing == "best_fit" and data.isolate_documents
    if data.kind == "hf" and not packed:
        instead = "data.packing=best_fit --set data.isolate_documents=true"
        raise target.refuse(recipe, "documents that are concatenated", instead)
    if not schedule.warmup_steps and not schedule.warmup_ratio:
        raise target.refuse(recipe, "no warm-up", "schedule.warmup_steps=2")
    if recipe.model.init == "random":
        raise target.refuse(recipe, "random weights", "model.init=pretrained")
    datasets = {
        name: [
            _dataset(target, recipe, source)
            for key, source in data.named_sources
            if key.startswith(side)
        ]
        for name, side in _SPLITS.items()
    }  # raises for sources of another kind
    trainer = target.trainer(recipe, plan)
    if trainer.pop("fsdp", None):
        trainer |= {"fsdp_version": 2, "fsdp_config": _fsdp(trainer["fsdp_config"])}
    found: dict[str, object] = {
        **dict(written_rows(_KEYS, recipe, plan)),
        **{_NAMES.get(name, name): value for name, value in trainer.items()},
        **{name: listed for name, listed in datasets.items() if listed},
        **_adapter(recipe),
        **_pairs(target, recipe),
        "sample_packing": data.packing != "none",
        **_too_long(target, recipe),
        "output_dir": f"outputs/{recipe.name}",
    }
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
        found["context_parallel_size"] = plan.layout.cp
        rings = {ours: theirs for theirs, ours in RINGS.items()}
        if kernels.context not in (*rings, "auto"):
            raise target.refuse(
                recipe, f"the exchange {kernels.context}", "kernels.context=auto"
            )
        found |= {"ring_attn_func": rings[kernels.context]} if kernels.context in rings else {}
    if schedule.min_learning_rate:
        share = schedule.min_learning_rate / recipe.optimizer.learning_rate
        found["cosine_min_lr_ratio"] = share
    alpaca = any(isinstance(one, ChatSource) and one.format == "alpaca" for one in data.sources)
    notes = ["`type: alpaca` has a prompt of its own, not the chat template"]
    return found, notes if alpaca else ()


def _too_long(target: FinetuningTarget, recipe: Recipe) -> dict[str, object]:
    """What becomes of longer rows, the same in all data sets."""
    found = {one.too_long for one in recipe.data.sources if not isinstance(one, DocumentSource)}
    if len(found) > 1 or "split" in found:
        raise target.refuse(recipe, "such a too_long", "data.train.too_long=drop")
    return {"excess_length_strategy": found.pop()} if found else {}


def _adapter(recipe: Recipe) -> dict[str, object]:
    if (adapter := recipe.adapter) is None:
        return {}
    found: dict[str, object] = {"adapter": "lora"}
    if adapter.init == "gaussian":
        found["peft_init_lora_weights"] = adapter.init
    if adapter.targets == "all-linear":
        return {**found, "lora_target_linear": True}
    return {**found, "lora_target_modules": list(adapter.targets)}


def _pairs(target: FinetuningTarget, recipe: Recipe) -> dict[str, object]:
    """The objective on pairs, and its weight."""
    if recipe.training.objective == "orpo":
        return {"rl": "orpo", "orpo_alpha": (recipe.orpo or OrpoSection()).beta}
    if recipe.training.objective != "dpo":
        return {}
    section = recipe.dpo or DpoSection()
    losses = {loss: name for name, (_, loss) in RL.items()}
    if section.loss not in losses or section.sft_weight:
        raise target.refuse(recipe, "such a loss of dpo", "dpo.loss=sigmoid")
    found = {"rl": losses[section.loss], "rl_beta": section.beta}
    if section.label_smoothing:
        found["dpo_label_smoothing"] = section.label_smoothing
    return found


def _dataset(target: FinetuningTarget, recipe: Recipe, source: Any) -> dict[str, object]:
    """An entry of `datasets`."""
    if not isinstance(source, HfSource | ChatSource | PreferenceSource) or source.weight:
        raise target.refuse(recipe, f"the source {source.title}", "data.train.kind=hf")
    names = ("path", "name", "split", "revision")
    entry: dict[str, object] = {
        name: value for name in names if (value := getattr(source, name)) is not None
    }
    if isinstance(source, HfSource):
        return {**entry, "type": "completion", "field": source.text_field}
    if isinstance(source, PreferenceSource):
        fields = {theirs: source.column(ours) for theirs, ours in FIELDS.items()}
        return {**entry, "type": "chat_template.default", **fields}
    if source.loss_on not in ("assistant", "all"):
        raise target.refuse(recipe, f"loss_on {source.loss_on}", "data.train.loss_on=assistant")
    if source.loss_on == "all":
        entry["roles_to_train"] = ["system", "user", "assistant", "tool"]
    if source.format == "alpaca":
        return {**entry, "type": "alpaca"}
    entry["type"] = "chat_template"
    if source.format == "messages":
        return {**entry, "field_messages": source.column("messages")}
    if source.format != "sharegpt":
        raise target.refuse(recipe, f"format {source.format}", "data.train.format=messages")
    mapped = {"role": "from", "content": "value"}
    column = source.column("conversations")
    return {**entry, "field_messages": column, "message_property_mappings": mapped}


def _fsdp(config: Mapping[str, object]) -> dict[str, object]:
    """The Trainer's words for FSDP 2 in Accelerate's."""
    names = {"cpu_offload": "offload_params"}
    return {names.get(name, name): value for name, value in config.items() if name != "version"}
