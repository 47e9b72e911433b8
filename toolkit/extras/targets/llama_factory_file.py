"""LLaMA-Factory's YAML from a recipe and its plan, and what its data sets are."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.extras.targets.finetuning import FinetuningTarget
from toolkit.extras.targets.values import read_options, written_rows
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import (
    ChatSource,
    ColumnName,
    DpoSection,
    HfSource,
    OrpoSection,
    PreferenceSource,
    Recipe,
)
from toolkit.targets.base import Row

INFO = "dataset_info.json"
STAGES = {"pt": "pretrain", "sft": "sft", "dpo": "dpo"}
LOSS_ON = {"train_on_prompt": "all", "mask_history": "last_assistant"}
PAIRS = {
    "pref_beta": "beta",
    "pref_loss": "loss",
    "pref_ftx": "sft_weight",
    "dpo_label_smoothing": "label_smoothing",
}
"""Its names of the settings of `dpo`; `orpo` has the first alone."""
ALPACA: Mapping[str, ColumnName] = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
}
"""Its words for the columns of the format alpaca, and ours."""
OPENAI = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
}
"""How it says that the messages of the format sharegpt are OpenAI's."""

OPTIONS = read_options("llama_factory")
_KEYS: Mapping[str, Row] = {
    **OPTIONS.rows,
    "model_name_or_path": "model.hub",
    "model_revision": "model.revision",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "use_rslora": "adapter.rslora",
    "val_size": "data.validation_fraction",
}
_SPLITS = {"dataset": "data.train", "eval_dataset": "data.validation"}


def values(
    target: FinetuningTarget, recipe: Recipe, plan: Plan
) -> tuple[dict[str, object], Sequence[str]]:
    """The file as plain data, and dataset_info.json as a note.

    Raises PlanError naming what it cannot express.
    """
    data, model = recipe.data, recipe.model
    refused = (
        (data.chat_template not in (None, "chatml"), "data.chat_template", "chatml"),
        (data.tokenizer != model.hub, "data.tokenizer", model.hub),
        (data.packing == "best_fit", "data.packing", "none"),
        (data.isolate_documents, "data.isolate_documents", "false"),
        (plan.layout.cp > 1, "parallel.context", "1"),
        (recipe.kernels.mlp != "whole", "kernels.mlp", "whole"),
        (recipe.kernels.loss == "liger", "kernels.loss", "auto"),
        (recipe.adapter and recipe.adapter.init != "kaiming", "adapter.init", "kaiming"),
    )
    for is_so, key, instead in refused:
        if is_so:
            raise target.refuse(recipe, key, f"{key}={instead}")
    info = {
        key.removeprefix("data.").replace("[", "_").removesuffix("]"): _entry(
            target, recipe, source
        )
        for key, source in data.named_sources
    }
    found: dict[str, object] = {
        **dict(written_rows(_KEYS, recipe, plan)),
        **_method(recipe),
        **target.trainer(recipe, plan),
        "dataset_dir": "data",
        **_masks(target, recipe),
        "neat_packing": data.packing == "greedy",
        "enable_liger_kernel": recipe.kernels.fused == "liger",
        "train_from_scratch": model.init == "random",
        "output_dir": f"saves/{recipe.name}",
    }
    for name, side in _SPLITS.items():
        listed = [one for one in info if f"data.{one}".startswith(side)]
        found |= {name: ",".join(listed)} if listed else {}
    if recipe.schedule.min_learning_rate:
        found["lr_scheduler_type"] = "cosine_with_min_lr"
        found["lr_scheduler_kwargs"] = {"min_lr": recipe.schedule.min_learning_rate}
    if data.chat_template:
        found["template"] = data.chat_template
    return found, [f"{found['dataset_dir']}/{INFO}: {json.dumps(info)}"]


def _method(recipe: Recipe) -> dict[str, object]:
    """The stage with the loss of pairs, and the adapter."""
    objective, adapter = recipe.training.objective, recipe.adapter
    stages = {ours: theirs for theirs, ours in STAGES.items()}
    found: dict[str, object] = {"stage": stages.get(objective, "dpo"), "do_train": True}
    if objective == "dpo":
        section = recipe.dpo or DpoSection()
        found |= {theirs: getattr(section, ours) for theirs, ours in PAIRS.items()}
    elif objective == "orpo":
        found |= {"pref_loss": "orpo", "pref_beta": (recipe.orpo or OrpoSection()).beta}
    if adapter is None:
        return {**found, "finetuning_type": "full"}
    targets = "all" if adapter.targets == "all-linear" else ",".join(adapter.targets)
    return {**found, "finetuning_type": "lora", "lora_target": targets}


def _masks(target: FinetuningTarget, recipe: Recipe) -> dict[str, bool]:
    """What is trained of conversations, of all data sets alike."""
    chats = [one.loss_on for one in recipe.data.sources if isinstance(one, ChatSource)]
    if len(set(chats)) > 1:
        raise target.refuse(recipe, "several loss_on", "data.train.loss_on=assistant")
    return {name: True for name, word in LOSS_ON.items() if word in chats}


def _entry(target: FinetuningTarget, recipe: Recipe, source: Any) -> dict[str, object]:
    """What dataset_info.json says of a source."""
    if not isinstance(source, HfSource | ChatSource | PreferenceSource) or source.weight:
        raise target.refuse(recipe, f"the source {source.title}", "data.train.kind=hf")
    entry: dict[str, object] = {
        "file_name" if source.path.startswith("/") else "hf_hub_url": source.path
    }
    entry |= {"subset": source.name} if source.name else {}
    entry |= {"split": source.split} if source.split != "train" else {}
    if isinstance(source, HfSource):
        return {**entry, "columns": {"prompt": source.text_field}}
    if isinstance(source, PreferenceSource):
        columns = {name: source.column(name) for name in ("prompt", "chosen", "rejected")}
        return {**entry, "ranking": True, "columns": columns}
    if source.format == "alpaca":
        columns = {theirs: source.column(ours) for theirs, ours in ALPACA.items()}
        return {**entry, "columns": columns}
    entry["formatting"] = "sharegpt"
    if source.format == "sharegpt":
        return {**entry, "columns": {"messages": source.column("conversations")}}
    if source.format == "messages":
        return {**entry, "columns": {"messages": source.column("messages")}, "tags": OPENAI}
    raise target.refuse(recipe, f"format {source.format}", "data.train.format=messages")
