"""What Megatron-LM's arguments mean that state data, or leave the model to a default.

Defaults are those of `validate_args` in megatron/training/arguments.py, core_v0.16.1.
"""

from collections.abc import Iterator

from toolkit.foreign.base import (
    ForeignSetting,
    NotCarried,
    Result,
    Rule,
    Settings,
    Stated,
    as_yaml,
    number,
)
from toolkit.foreign.values import indexed, validation_share, value_in

GPT2_TOKENIZER = "openai-community/gpt2"
_DROPOUT = 0.1


def sources(ours: str) -> Rule:
    """A row of a data flag: one prefix, several, or weights and prefixes in turn."""

    def rule(setting: ForeignSetting, _: Settings) -> list[Result]:
        words = setting.value if isinstance(setting.value, list) else [setting.value]
        if len(words) == 1:
            return [Stated(f"{ours}.prefix", words[0], setting)]
        weights = [number(as_yaml(str(word))) for word in words[::2]]
        if len(words) % 2 or None in weights:
            return indexed(ours, setting, words)
        return indexed(ours, setting, words[1::2], [weight or 0.0 for weight in weights])

    return rule


def split(setting: ForeignSetting, _: Settings) -> list[Result]:
    """Shares of training, validation and test."""
    if (share := validation_share(setting.value)) is None:
        return [NotCarried("not shares such as `969,30,1`: see data.validation_fraction")]
    return [Stated("data.validation_fraction", share, setting)]


def tokenizer(setting: ForeignSetting, flags: Settings) -> list[Result]:
    """A kind of tokenizer, where no other flag names its files."""
    if "--tokenizer-model" in flags:
        return []
    if setting.value == "GPT2BPETokenizer":
        return [Stated("data.tokenizer", GPT2_TOKENIZER, setting)]
    return [NotCarried("name the tokenizer's folder or hub id in data.tokenizer")]


def model_defaults(flags: Settings, place: str) -> Iterator[Stated]:
    """Sizes and dropouts of a model that the arguments describe and do not state."""
    names = ("--hidden-size", "--num-attention-heads")
    hidden, heads = (int(number(value_in(flags, name)) or 0) for name in names)
    if not hidden or not heads:
        return
    inner = hidden * 8 // 3 // 64 * 64 if "--swiglu" in flags else 4 * hidden
    found = {
        "--ffn-hidden-size": ("ffn_hidden_size", inner),
        "--kv-channels": ("kv_channels", hidden // heads),
        "--attention-dropout": ("attention_dropout", _DROPOUT),
        "--hidden-dropout": ("hidden_dropout", _DROPOUT),
    }
    for flag, (field, value) in found.items():
        if flag not in flags:
            at = ForeignSetting(f"{flag} (default)", value, place)
            yield Stated(f"megatron.{field}", value, at)
