"""Files as torch.save writes them, of any content, and a model of GPT-NeoX."""

import io
import zipfile

HUGE = b"\x8a\x06\x00\x00\x00\x00\x00\x01"
"""2 ** 40."""
NEOX = """\
  config: {model_type: gpt_neox, hidden_size: 64, num_hidden_layers: 2, vocab_size: 320,
    num_attention_heads: 4, intermediate_size: 128}
"""


def zipped(content: bytes, storage: bytes = b"\0\0\0\0", compression: int = 0) -> bytes:
    """A file as torch.save writes it, with this pickle and storage 0."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", storage)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()
