"""LLaMA-Factory's YAML from a recipe and its plan, and what its data sets are."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolkit.errors import Problem
from toolkit.extras.targets.finetuning import FinetuningTarget, lowest_rate_written
from toolkit.extras.targets.values import written_rows
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
from toolkit.targets.options import read_options

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

LORA = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "use_rslora": "rslora",
}
"""Its names of the settings of `adapter`."""

OPTIONS = read_options("llama_factory", __file__)
_SPLITS = {"dataset": "data.train", "eval_dataset": "data.validation"}


def problems(target: FinetuningTarget, recipe: Recipe, plan: Plan) -> Iterator[Problem]:
    """What LLaMA-Factory cannot express."""
    data, model, kernels, adapter = recipe.data, recipe.model, recipe.kernels, recipe.adapter
    rows = (
        ("data.chat_template", data.chat_template, (None, "chatml")),
        ("data.tokenizer", data.tokenizer, (model.hub,)),
        ("data.packing", data.packing, ("none", "greedy")),
        ("data.isolate_documents", data.isolate_documents, (False,)),
        ("parallel.context", plan.layout.cp, (1,)),
        ("kernels.mlp", kernels.mlp, ("whole",)),
        ("kernels.loss", kernels.loss, ("auto", "whole", "chunked")),
        ("adapter.init", adapter.init if adapter else "kaiming", ("kaiming",)),
    )
    for key, value, known in rows:
        if value not in known:
            yield target.problem(key, value, known[0])
    yield from target.source_problems(recipe)
    masks = {one.loss_on for one in data.sources if isinstance(one, ChatSource)}
    if len(masks) > 1:
        yield target.problem("data.train.loss_on", ", ".join(sorted(masks)), "assistant")


def values(
    target: FinetuningTarget, recipe: Recipe, plan: Plan
) -> tuple[dict[str, Any], Sequence[str]]:
    """The file as plain data, and dataset_info.json as a note."""
    data, model = recipe.data, recipe.model
    info = {
        key.removeprefix("data.").replace("[", "_").removesuffix("]"): _entry(source)
        for key, source in data.named_sources
    }
    masks = {one.loss_on for one in data.sources if isinstance(one, ChatSource)}
    found: dict[str, Any] = {
        **dict(written_rows(OPTIONS.rows, recipe, plan)),
        "model_name_or_path": model.hub,
        **({"model_revision": model.revision} if model.revision else {}),
        "val_size": data.validation_fraction,
        **_method(recipe),
        **target.trainer(recipe, plan),
        "dataset_dir": "data",
        **{name: True for name, word in LOSS_ON.items() if word in masks},
        "neat_packing": data.packing == "greedy",
        "enable_liger_kernel": recipe.kernels.fused == "liger",
        "train_from_scratch": model.init == "random",
        "output_dir": f"saves/{recipe.name}",
    }
    for name, side in _SPLITS.items():
        listed = [one for one in info if f"data.{one}".startswith(side)]
        found |= {name: ",".join(listed)} if listed else {}
    found |= lowest_rate_written(recipe)
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
    found |= {theirs: getattr(adapter, ours) for theirs, ours in LORA.items()}
    return {**found, "finetuning_type": "lora", "lora_target": targets}


def _entry(source: Any) -> dict[str, object]:
    """What dataset_info.json says of a source."""
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
    openai = source.format == "messages"
    column = source.column("messages" if openai else "conversations")
    tags = {"tags": OPENAI} if openai else {}
    return {**entry, "formatting": "sharegpt", "columns": {"messages": column}, **tags}
