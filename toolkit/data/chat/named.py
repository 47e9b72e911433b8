"""The chat template that a recipe names, or that its tokenizer has."""

from pathlib import Path

from toolkit.data.files import read_bytes

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""The shipped template: works with every tokenizer, `bytes` included."""
_SHIPPED = {"chatml": CHATML}


def stated_template(stated: str, base: Path) -> str:
    """A shipped template, one written in the recipe, or the content of a file.

    Raises DataError when the file cannot be read.
    """
    if stated in _SHIPPED:
        return _SHIPPED[stated]
    if "{" in stated:
        return stated
    return read_bytes(base / Path(stated).expanduser()).decode(errors="replace")
