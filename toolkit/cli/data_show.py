"""How `dmt data show` prints a preview."""

from rich.text import Text

from toolkit.cli.console import Console
from toolkit.data.preview import Preview, ShownDocument

_BAR_WIDTH = 40
_TRAINED = "bold green"


def print_preview(shown: Preview, title: str = "") -> None:
    """Samples, trained tokens in colour, or between « and » where there is none; numbers.
    `title` is that of a source among several."""
    console = Console(soft_wrap=True)
    if title:
        console.rule(Text(title, style="bold"), characters="═", align="left")
    marks = console.color_system is None
    for sample in shown.samples:
        for number, document in enumerate(sample.documents, start=1):
            part = f", document {number} of {len(sample.documents)}"
            console.rule(
                f"sample {sample.index}{part * (len(sample.documents) > 1)}: "
                f"{document.tokens:,} tokens, {document.trained_tokens:,} trained",
                align="left",
            )
            console.print(_text(document, marks))
    if shown.samples:
        console.rule()
    legend = "between « and »" if marks else "green"
    console.print(
        f"{shown.trained_share:.1%} of the tokens are trained ({legend}); "
        f"{shown.filled:.1%} of the positions are filled"
    )
    console.print(
        f"{shown.n_samples:,} samples of {shown.sequence_length:,} tokens from "
        f"{shown.n_documents:,} documents; their lengths in tokens:"
    )
    largest = max((one.documents for one in shown.lengths), default=1)
    width = len(f"{shown.lengths[-1].up_to:,}") if shown.lengths else 0
    for one in shown.lengths:
        bar = "█" * round(_BAR_WIDTH * one.documents / largest)
        console.print(f"  ≤ {one.up_to:{width},} {bar:{_BAR_WIDTH}} {one.documents:,}")
    for name, count in (shown.counts or {}).items():
        if count:
            console.print(f"{name.replace('_', ' ')}: {count}")


def _text(document: ShownDocument, marks: bool) -> Text:
    text = Text()
    for passage in document.passages:
        if not passage.trained:
            text.append(passage.text)
        elif marks:
            text.append(f"«{passage.text}»")
        else:
            text.append(passage.text, _TRAINED)
    if document.hidden_tokens:
        text.append(f"\n… {document.hidden_tokens:,} more tokens")
    return text
