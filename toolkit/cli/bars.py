"""Numbers and bars as `dmt plan` and `dmt estimate` show them."""

from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

MIB_PER_GIB = 1024
BAR_WIDTH = 24
"""Characters of a full bar."""


def bars(parts: Mapping[str, float], whole: float, unit: str) -> Iterator[Text]:
    """One line per part that is not zero; bars are shares of `whole`. Unit: GiB or s."""
    for part, amount in parts.items():
        if amount > 0:
            share = min(1.0, amount / whole)
            bar = "█" * round(share * BAR_WIDTH)
            shown = seconds(amount) if unit == "s" else size(amount)
            yield Text.assemble(f"    {part:<22}{shown:>10}  ", (bar, "cyan"))


def size(gib: float) -> str:
    """`75.80 GiB`, `1.2 MiB`."""
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * MIB_PER_GIB:.1f} MiB"


def seconds(value: float) -> str:
    """`4.14 s`, `120.5 ms`."""
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def columns(rows: Sequence[Sequence[str]], left: int = 1, gap: str = "  ") -> list[str]:
    """Rows in columns as wide as they must be, the first `left` to the left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
