"""The chat template that a recipe names."""

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.data.files import read_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""The shipped template: works with every tokenizer, `bytes` included."""
_SHIPPED = {"chatml": CHATML}


def template_text(
    stated: str | None, tokenizer: "PreTrainedTokenizerFast", base: Path
) -> str | None:
    """The template that a recipe names (`data.chat_template`), else the tokenizer's own."""
    if stated is not None:
        return stated_template(stated, base)
    own = tokenizer.chat_template
    return own.get("default") if isinstance(own, dict) else own


def stated_template(stated: str, base: Path) -> str:
    """A shipped template, one written in the recipe, or the content of a file.

    Raises DataError when the file cannot be read.
    """
    if stated in _SHIPPED:
        return _SHIPPED[stated]
    if "{" in stated:
        return stated
    return read_bytes(base / Path(stated).expanduser()).decode(errors="replace")
