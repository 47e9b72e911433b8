"""`dmt chat`: a look at a model at the terminal."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.console import Console
from toolkit.cli.eval import Judged, device_of, exported_folder
from toolkit.text.terminal import tell

_CLEAR = "/clear"


def chat(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|FOLDER", help="A run, a checkpoint, or a Hugging Face folder."
        ),
    ],
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 512,
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda", help="auto: the run's; a GPU for a folder.")
    ] = "auto",
) -> None:
    """Talk to a model, by greedy decoding; without a chat template it completes each line.

    A line is a turn; lines may come from a pipe. Ctrl-D ends, `/clear` begins a new
    conversation.

    Example: `echo 'import os' | dmt chat runs/tiny-llama-bytes --max-tokens 40`
    """
    from toolkit.evaluate.completions import Message, load, stream, tokens_of

    judged = Judged.of(path)
    # The export stays to the end: weights that found no room in memory are read from it.
    with exported_folder(judged) as folder:
        model, tokenizer = load(folder, device_of(device, judged.recipe))
        console = Console()
        template = tokenizer.chat_template is not None
        if not template:
            tell("no chat template: each line is completed as it is")
        turns: list[Message] = []
        for line in _typed():
            if line == _CLEAR:
                turns = []
                continue
            turns.append({"role": "user", "content": line})
            tokens = tokens_of(tokenizer, turns if template else line, chat=template)
            pieces = []
            for piece in stream(model, tokenizer, tokens, max_tokens):
                pieces.append(piece)
                console.print(piece, end="", soft_wrap=True)
            console.print()
            turns.append({"role": "assistant", "content": "".join(pieces)})


def _typed() -> Iterator[str]:
    """The lines that are typed or piped, without empty ones; Ctrl-C and Ctrl-D end them."""
    asks = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if asks else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line
