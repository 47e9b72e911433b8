"""Megatron-LM's arguments that depend on others, and the config of the model they describe.

Defaults are those of `validate_args` in megatron/training/arguments.py and of pretrain_gpt.py,
core_v0.16.1.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.errors import Problem
from toolkit.foreign.carry import (
    Carried,
    ForeignSetting,
    Found,
    Settings,
    number,
    same,
)
from toolkit.foreign.tables import tool
from toolkit.models.families import arguments, megatron_model, model_spec, unsupported
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.yaml_text import resolve_plain

_GPT2_TOKENIZER = ("GPT2BPETokenizer", "openai-community/gpt2", 50257)
"""pretrain_gpt.py's own tokenizer: its type, name and tokens."""
_READABLE = ("HuggingFaceTokenizer", "Llama2Tokenizer", "Llama3Tokenizer", "MistralTokenizer")
NAME_IT = "name the model, which is then taken instead: dmt init MODEL --from FILE"
_DATA = {
    "--data-path": "data.train",
    "--train-data-path": "data.train",
    "--valid-data-path": "data.validation",
}


def rules(found: Found, settings: Settings, _: JsonFile) -> None:
    """Data, tokenizer, lengths, intervals and the pipeline."""
    _unknown_to_python(found, settings)
    for name, key in _DATA.items():
        if name in settings:
            _sources(found, key, settings[name])
    _split(found, settings.get("--split"))
    _tokenizer(found, settings)
    _lengths(found, settings)
    _validations(found, settings.get("--eval-iters"))
    _layout(found, settings)


def _unknown_to_python(found: Found, settings: Settings) -> None:
    """What only the shell knows: names of files and places are for the user to state. A number
    that a default would replace is refused."""
    for key, one in [*found.values.items()]:
        if "$" in str(one.value):
            del found.values[key]
            found.drop(one.at, f"only the shell knows {one.at.written}")
    kept = []
    for problem in found.problems:
        at = settings.get(problem.key.replace("_", "-"))
        if at is None or "$" not in str(at.value):
            kept.append(problem)
        elif problem.allowed.startswith(("cluster.", "logging.")):
            found.drop(at, f"only the shell knows {at.written}")
        else:
            kept.append(at.problem("a value that the script itself states", "write the value"))
    found.problems = kept


def _sources(found: Found, key: str, at: ForeignSetting) -> None:
    """One prefix, several, or weights and prefixes in turn."""
    words = at.value if isinstance(at.value, list) else [at.value]
    if any("$" in str(word) for word in words):
        found.drop(at, f"only the shell knows {at.written}")
        return
    weights = [number(resolve_plain(str(word))) for word in words[::2]]
    prefixes = [str(word) for word in words]
    if len(words) > 1 and len(words) % 2 == 0 and None not in weights:
        prefixes = prefixes[1::2]
    else:
        weights = [1.0] * len(words)
    sources: list[dict[str, Any]] = [{"kind": "megatron", "prefix": one} for one in prefixes]
    if len(sources) == 1:
        found.values[f"{key}.prefix"] = Carried(prefixes[0], at)
        return
    if key == "data.train":
        sources = [
            {**one, "weight": float(share or 0)}
            for one, share in zip(sources, weights, strict=True)
        ]
    elif len({*weights}) > 1:
        found.drop(at, "validation takes its sources without weights")
    found.values[key] = Carried(sources, at)


def _split(found: Found, at: ForeignSetting | None) -> None:
    """Shares of training, validation and test: no run tests."""
    if at is None:
        return
    shares = [float(one) for one in re.findall(r"\d+\.?\d*|\.\d+", str(at.value))]
    if sum(shares) <= 0 or "$" in str(at.value):
        found.problems.append(at.problem("shares such as 969,30,1"))
        return
    found.put("data.validation_fraction", round(1 - shares[0] / sum(shares), 12), at)


def _tokenizer(found: Found, settings: Settings) -> None:
    kind, model = settings.get("--tokenizer-type"), settings.get("--tokenizer-model")
    word = str(kind.value) if kind is not None else ""
    if model is not None and "$" not in str(model.value) and word in ("", *_READABLE):
        found.put("data.tokenizer", str(model.value), model)
    elif (at := _gpt2_tokenizer(settings)) is not None:
        found.put("data.tokenizer", _GPT2_TOKENIZER[1], at, "if the files are GPT-2's")
    elif (at := model or kind) is not None:
        found.drop(at, "write the tokenizer's folder or hub id in data.tokenizer")


def _gpt2_tokenizer(settings: Settings) -> ForeignSetting | None:
    """The setting by which it is GPT-2's tokenizer."""
    kind = settings.get("--tokenizer-type")
    if kind is None and "--tokenizer-model" not in settings:
        return settings.get("--merge-file")
    return kind if kind is not None and kind.value == _GPT2_TOKENIZER[0] else None


def _lengths(found: Found, settings: Settings) -> None:
    batch = found.values.get("training.global_batch_size")
    for name, key in {
        "--train-samples": "training.steps",
        "--lr-warmup-samples": "schedule.warmup_steps",
    }.items():
        at = settings.get(name)
        if at is None:
            continue
        count = number(at.value)
        if batch is None or count is None:
            found.problems.append(at.problem("a number, and --global-batch-size next to it"))
        else:
            steps = count / batch.value
            found.put(key, math.floor(steps) if "train" in name else math.ceil(steps), at)
    if (at := settings.get("--lr-decay-iters")) is not None:
        steps = found.values.get("training.steps")
        if steps is None or not same(steps.value, at.value):
            found.drop(at, "the decay ends with the run")
    wsd = found.values.get("schedule.name")
    if wsd is not None and wsd.value == "wsd" and "schedule.decay" not in found.values:
        found.problems.append(
            wsd.at.problem("WSD with --lr-wsd-decay-style linear, cosine or minus_sqrt")
        )


def _validations(found: Found, at: ForeignSetting | None) -> None:
    """Batches of a validation. Without any there is none."""
    if at is not None and at.value:
        found.put("evaluation.batches", at.value, at)
    elif at is not None:
        for key in ("evaluation.every_steps", "evaluation.batches"):
            found.defaults.pop(key, None)
            found.values.pop(key, None)


def _layout(found: Found, settings: Settings) -> None:
    if (at := settings.get("--recompute-granularity")) is not None:
        layers = settings.get("--recompute-num-layers")
        method = settings.get("--recompute-method")
        some = at.value == "full" and method is not None and method.value == "block"
        found.put("parallel.recompute", layers.value if some and layers else at.value, at)
    stages = found.number("parallel.pipeline")
    if (at := settings.get("--num-layers-per-virtual-pipeline-stage")) is not None:
        of_model = found.shape.get("--num-layers")
        depth, size = number(of_model.value if of_model else None), number(at.value)
        if not depth or not size:
            found.problems.append(at.problem("a number, and --num-layers next to it"))
        else:
            found.put("parallel.virtual_pipeline", int(depth // (stages * size)), at)
    if (at := settings.get("--pipeline-model-parallel-layout")) is not None:
        chunks = (str(at.value).count("|") + 1) // stages
        found.put("parallel.virtual_pipeline", max(1, chunks), at)


# The model


_FOLLOWING = (
    *("max_sequence_length", "kv_channels", "moe_router_load_balancing_type"),
    *("moe_aux_loss_coeff", "initializer_range"),
)
"""Fields that follow from others, from the lengths of a run, or are of the loss."""


def config_of(found: Found) -> tuple[dict[str, Any], list[Problem]]:
    """The Hugging Face config of the model that the arguments describe, empty where they
    describe none, and what no config made here has."""
    stated: dict[str, ForeignSetting] = {}
    fields: dict[str, Any] = {}
    problems = []
    for name, at in found.shape.items():
        field = tool("megatron_lm").shape.get(name)
        if field is None:
            if at.value not in (None, False, 0):
                problems.append(at.problem("a model without it", NAME_IT))
        elif isinstance(field, Mapping):
            fields |= field
            stated |= dict.fromkeys(field, at)
        elif field and not (name == "--vocab-size" and "--padded-vocab-size" in found.shape):
            fields[field], stated[field] = at.value, at
    if not {"num_layers", "hidden_size"} & fields.keys() and not problems:
        return {}, []
    _add_defaults(found, fields)
    for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if not isinstance(fields.get(name), int):
            at = stated.get(name) or next(iter(found.shape.values()))
            flag = f"--{name.replace('_', '-')}"
            missing = Problem(
                flag, "nothing", "a number", f"add it, or {NAME_IT}", at.file, at.line
            )
            problems.append(missing if name not in stated else at.problem("a whole number"))
    if problems:
        return {}, problems
    config = _config(fields)
    return config, _differences(found, config, fields, stated)


def _add_defaults(found: Found, fields: dict[str, Any]) -> None:
    hidden, heads = (
        number(fields.get(one)) or 0 for one in ("hidden_size", "num_attention_heads")
    )
    gated = fields.get("gated_linear_unit")
    inner = int(hidden * 8 // 3 // 64 * 64) if gated else int(4 * hidden)
    defaults: dict[str, Any] = {
        **tool("megatron_lm").shape_defaults,
        "ffn_hidden_size": inner,
        "kv_channels": int(hidden // heads) if heads else None,
    }
    if (
        "data.tokenizer" in found.values
        and found.values["data.tokenizer"].value == _GPT2_TOKENIZER[1]
    ):
        divisor = number(found.context.get("--make-vocab-size-divisible-by")) or 128
        multiple = int(divisor) * found.number("parallel.tensor")
        defaults["vocab_size"] = -(-_GPT2_TOKENIZER[2] // multiple) * multiple
    for name, value in defaults.items():
        fields.setdefault(name, value)


def _config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The closest model of those that the table has, by the names of its config."""
    kind = "gpt2"
    if fields.get("gated_linear_unit"):
        kinds = {"num_moe_experts": "mixtral", "qk_layernorm": "qwen3", "add_qkv_bias": "qwen2"}
        kind = next((kinds[name] for name in kinds if fields.get(name)), "llama")
    config: dict[str, Any] = {"model_type": kind}
    for name, (field, *otherwise) in tool("megatron_lm").configs[kind].items():
        value = fields.get(field)
        for one in otherwise if value is None else ():
            value = fields.get(one) if isinstance(one, str) else one
        config[name] = value
    return config


def _differences(
    found: Found, config: Mapping[str, Any], fields: Mapping[str, Any],
    stated: Mapping[str, ForeignSetting],
) -> list[Problem]:  # fmt: skip
    """What the config's model has otherwise: a problem where the arguments state it, else a
    default that is left."""
    spec = model_spec(config)
    made = {**arguments.transformer_sizes(spec), **arguments.gpt_sizes(spec)}
    if unsupported(config) is None:
        model = megatron_model(config)
        made = {**model.transformer, **model.gpt}
        if rope := made.get("rope_parameters"):
            made["rotary_base"] = rope["rope_theta"]
            made["rotary_percent"] = rope["partial_rotary_factor"]
    problems = []
    first = next(iter(found.shape.values()))
    for name, value in fields.items():
        has = made.get(name)
        if name in _FOLLOWING or same(value, has):
            continue
        theirs = f"the closest model, {config['model_type']}, has {in_yaml(has)}"
        if name in ("attention_dropout", "hidden_dropout"):
            at = stated.get(name) or ForeignSetting(
                f"--{name.replace('_', '-')}", value, first.file
            )
            found.drop(at, theirs)
        elif name in stated:
            problems.append(
                stated[name].problem(f"{in_yaml(has)}, as in {config['model_type']}", NAME_IT)
            )
        else:
            default = ForeignSetting(f"--{name.replace('_', '-')} (default)", value, first.file)
            found.drop(default, theirs)
    return problems
