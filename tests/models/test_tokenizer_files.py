"""The tokenizer of an export is prompted with the template that it was trained with."""

import json
from pathlib import Path

from transformers import AutoTokenizer

from toolkit.data.tokenizers import byte_tokenizer
from toolkit.models import huggingface as hf


def test_the_recipes_template_replaces_that_of_the_folder(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "export"
    byte_tokenizer().save_pretrained(source)
    config = source / "tokenizer_config.json"
    old = json.loads(config.read_text()) | {"chat_template": "OLD"}
    config.write_text(json.dumps(old))
    folder.mkdir()
    hf.copy_tokenizer(source, folder)
    assert AutoTokenizer.from_pretrained(folder).chat_template == "OLD"
    hf.write_chat_template("NEW {{ messages }}", folder)
    assert AutoTokenizer.from_pretrained(folder).chat_template == "NEW {{ messages }}"
