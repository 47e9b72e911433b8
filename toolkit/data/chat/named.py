"""The chat template that a recipe names, or that its tokenizer has."""

import re
from collections.abc import Iterable
from pathlib import Path

from toolkit.data.files import read_bytes
from toolkit.recipe.schema import DataSection
from toolkit.system.untrusted import read_json

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""The shipped template: works with every tokenizer, `bytes` included."""
_SHIPPED = {"chatml": CHATML}
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of one key of a message: transformers gives a template all of them."""


def stated_template(stated: str, base: Path) -> str:
    """A shipped template, one written in the recipe, or the content of a file.

    Raises DataError when the file cannot be read.
    """
    if stated in _SHIPPED:
        return _SHIPPED[stated]
    if "{" in stated:
        return stated
    return read_bytes(base / Path(stated).expanduser()).decode(errors="replace")


def known_template(data: DataSection, base: Path) -> str | None:
    """The template of a recipe's chats, or all that its tokenizer has, one after the other;
    None where only transformers or the hub knows."""
    if data.chat_template is not None:
        return stated_template(data.chat_template, base)
    file = _tokenizer_file(data, "chat_template.jinja", base)
    if file is not None:
        return file.read_text(errors="replace")
    file = _tokenizer_file(data, "tokenizer_config.json", base)
    own = None if file is None else read_json(file).get("chat_template")
    return "\n".join(one["template"] for one in own) if isinstance(own, list) else own


def _tokenizer_file(data: DataSection, name: str, base: Path) -> Path | None:
    folder = base / Path(data.tokenizer).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(data.tokenizer, name, revision=data.tokenizer_revision)
    except HFValidationError:  # a folder that is not there
        return None
    return Path(found) if isinstance(found, str) else None


def reads(template: Iterable[str], key: str) -> bool:
    """Whether a text of a template names this key of a message."""
    names = _THOUGHTS if key in _THOUGHTS else (key,)
    words = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
    return any(map(words.search, template))
