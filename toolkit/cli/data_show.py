"""How `dmt data show` prints previews."""

from collections.abc import Iterator, Mapping

from rich.text import Text

from toolkit.cli.output import Console, Line
from toolkit.data.preview import Preview, ShownDocument

_BAR_WIDTH = 40
_TRAINED = "bold green"


def previews(shown: Mapping[str, Preview]) -> Iterator[Line]:
    """Lines of samples by source title, then numbers about each source. Trained tokens are in
    colour, or between « and » where there is none."""
    marks = Console().color_system is None
    for title, preview in shown.items():
        if len(shown) > 1:
            yield Text(f"{title} {'═' * _BAR_WIDTH}", "bold")
        yield from _preview(preview, marks)


def _preview(shown: Preview, marks: bool) -> Iterator[Line]:
    for sample in shown.samples:
        for number, document in enumerate(sample.documents, start=1):
            part = f", document {number} of {len(sample.documents)}"
            yield Text(
                f"── sample {sample.index}{part * (len(sample.documents) > 1)}: "
                f"{document.tokens:,} tokens, {document.trained_tokens:,} trained",
                "green",
            )
            yield _text(document, marks)
    if shown.samples:
        yield "─" * _BAR_WIDTH
    legend = "between « and »" if marks else "green"
    yield (
        f"{shown.trained_share:.1%} of the tokens are trained ({legend}); "
        f"{shown.filled:.1%} of the positions are filled"
    )
    yield (
        f"{shown.n_samples:,} samples of {shown.sequence_length:,} tokens from "
        f"{shown.n_documents:,} documents; their lengths in tokens:"
    )
    largest = max((one.documents for one in shown.lengths), default=1)
    width = len(f"{shown.lengths[-1].up_to:,}") if shown.lengths else 0
    for one in shown.lengths:
        bar = "█" * round(_BAR_WIDTH * one.documents / largest)
        yield f"  ≤ {one.up_to:{width},} {bar:{_BAR_WIDTH}} {one.documents:,}"
    yield from (
        f"{name.replace('_', ' ')}: {', '.join(count) if isinstance(count, tuple) else count}"
        for name, count in (shown.counts or {}).items()
        if count
    )


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
