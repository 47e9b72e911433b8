"""Tokenizers: from the hub, from a folder, the shipped byte-level one, or newly trained."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.data.files import fingerprint_of, unreadable
from toolkit.errors import DataError
from toolkit.models.hub import answers, asks_to_run_code, runs_code

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

BYTES = "bytes"
"""Name of the shipped tokenizer in a recipe."""
END_OF_TEXT = "<|endoftext|>"
"""End-of-document token of the shipped tokenizer."""
BYTES_VOCAB_SIZE = 257
"""256 bytes and `END_OF_TEXT`. Also the smallest vocabulary of a byte-level BPE."""
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""The shipped chat template: works with every tokenizer, `bytes` included."""
_NAME_ONE = f"give a folder with a tokenizer.json, a hub id, or `{BYTES}`"
_OLDER_FILES = ("*.model", "vocab*", "*.tiktoken")
"""Files of which transformers makes a fast tokenizer if there is no tokenizer.json."""


def load_tokenizer(name: str, revision: str | None = None) -> "PreTrainedTokenizerFast":
    """Load the tokenizer `name`: `bytes`, a local folder or a hub id.

    Raises DataError when it cannot be had, is not a fast tokenizer (those alone run in
    parallel and can be stored as one file), or has no token that ends a document.
    """
    if name == BYTES:
        return byte_tokenizer()
    tokenizer = _from_pretrained(str(_folder(name) or name), revision)
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer `{name}` has no end-of-sequence token, so documents cannot be "
            "kept apart",
            fix="set `eos_token` in its tokenizer_config.json, or use another tokenizer",
        )
    return tokenizer


def stated_template(stated: str) -> str:
    """The chat template that a recipe states: a shipped one, its text, or a file's content.

    Raises DataError when the file cannot be read.
    """
    if stated == "chatml":
        return CHATML
    if "{" in stated:
        return stated
    try:
        return Path(stated).read_bytes().decode(errors="replace")
    except OSError as error:
        raise unreadable(stated, error) from error


def _folder(name: str) -> Path | None:
    """The local folder that `name` means. None for a hub id."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")):
        raise DataError(f"tokenizer: there is no folder {folder}", fix=_NAME_ONE)
    return None


def count_tokens(name: str) -> int | None:
    """Tokens of `bytes`, or of the tokenizer in a local folder. None where only transformers
    knows.

    Raises DataError when there is no such folder, or no tokenizer in it.
    """
    if name == BYTES:
        return BYTES_VOCAB_SIZE
    folder = _folder(name)
    if folder is None:
        return None
    file = folder / "tokenizer.json"
    if not file.is_file():
        if not any(any(folder.glob(pattern)) for pattern in _OLDER_FILES):
            raise DataError(f"tokenizer: {folder} holds no tokenizer.json", fix=_NAME_ONE)
        return None
    from tokenizers import Tokenizer

    with _guarded(f"tokenizer: {file} cannot be read", _NAME_ONE):
        return int(Tokenizer.from_file(str(file)).get_vocab_size())


def check_vocabulary(name: str, n_tokens: int, vocab_size: int | None) -> None:
    """Raise DataError when a tokenizer has more tokens than the model (None: unknown)."""
    if vocab_size is not None and n_tokens > vocab_size:
        raise DataError(
            f"the tokenizer `{name}` has {n_tokens:,} tokens; the model's vocabulary has "
            f"{vocab_size:,}",
            fix="use the tokenizer that belongs to the model; or, with `init: random`, set "
            f"`model.config.vocab_size` to {n_tokens} or more; or add rows to a copy: "
            "model = AutoModelForCausalLM.from_pretrained(HUB); "
            f"model.resize_token_embeddings({n_tokens}); model.save_pretrained(FOLDER); and "
            "state model.hub: FOLDER",
        )


def _from_pretrained(name: str, revision: str | None) -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer

    cached_only = not Path(name).is_dir() and not answers(name, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=False, local_files_only=cached_only
        )
    except BaseException as error:  # a broken tokenizer.json raises a bare Exception, or panics
        if _is_ours(error):
            raise
        if asks_to_run_code(error):
            raise runs_code(f"the tokenizer `{name}`") from error
        reason = str(error).strip() or type(error).__name__
        if cached_only:
            reason = "the hub is not reachable, and its local cache does not hold it"
        raise DataError(
            f"cannot load the tokenizer `{name}`: {reason}",
            fix=f"{_NAME_ONE}; without network, download the tokenizer once while online",
        ) from error
    if not tokenizer.is_fast:
        raise DataError(
            f"the tokenizer `{name}` has no fast version (tokenizer.json)",
            fix="convert it with transformers and give the folder of the result",
        )
    return tokenizer


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """The shipped tokenizer: token id = byte value, and 256 = `<|endoftext|>`.

    It encodes any text and decodes it back without loss.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in sorted(bytes_to_unicode().items())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Without merges there is nothing to gain from first splitting the text into words.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def encoder(tokenizer: "PreTrainedTokenizerFast", *, parse_special: bool) -> "Tokenizer":
    """A copy of the tokenizer's Rust half that neither truncates nor pads.

    Unless `parse_special`, the name of a special token in a text is text.
    """
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = not parse_special
    return backend


def encoding() -> AbstractContextManager[None]:
    """While texts are encoded: raise DataError for what a damaged tokenizer raises."""
    return _guarded(
        "the tokenizer cannot encode a text",
        "copy its files again from where they are whole, or name another tokenizer",
    )


@contextmanager
def _guarded(problem: str, fix: str) -> Iterator[None]:
    """Raise DataError for what the library raises."""
    try:
        yield
    except BaseException as error:
        if _is_ours(error):
            raise
        raise DataError(f"{problem}: {error}", fix=fix) from error


def _is_ours(error: BaseException) -> bool:
    """Whether it is no error of the library, but Ctrl-C, an exit or the like. A panic of its
    Rust code is no Exception."""
    return not (isinstance(error, Exception) or type(error).__name__ == "PanicException")


def spells_bytes(backend: "Tokenizer") -> bool:
    """Whether it encodes every text as its UTF-8 bytes: the shipped tokenizer, not parsing."""
    shipped = byte_tokenizer().backend_tokenizer.to_str()
    return bool(backend.encode_special_tokens) and backend.to_str() == shipped


def tokens_before_text(backend: "Tokenizer") -> list[int]:
    """Tokens that the tokenizer itself puts before every text, e.g. a BOS token."""
    with encoding():
        found = backend.encode("a", add_special_tokens=True)
        mask = found.special_tokens_mask
        return list(found.ids[: next(i for i, special in enumerate(mask) if not special)])


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Hash, in hex, of everything in the tokenizer that decides the tokens of a document."""
    backend = encoder(tokenizer, parse_special=True)
    return fingerprint_of([backend.to_str(), tokenizer.eos_token_id])
