"""The formulas of `dmt plan --explain`: why each number is as it is."""

from collections.abc import Iterator, Mapping

from rich.text import Text

from toolkit.plan.cost.derivation import Derivation, Symbol, amount
from toolkit.plan.estimate import Derivations
from toolkit.units import GIB, MIB_PER_GIB, seconds, size


def lines(found: Derivations) -> Iterator[Text]:
    """Each part of memory and time: its formula, the symbols' values, its source."""
    for what, parts, name in (
        ("memory", found.memory, "x_bytes"),
        ("time", found.time, "x_s"),
        ("MFU", {} if found.mfu is None else {"MFU": found.mfu}, "mfu"),
    ):
        if parts:
            yield Text(f"  why each number: {what}", "dim")
        for part, one in parts.items():
            yield from _derived(part, _shown(name, one.value), one, "  - ", "bold")


def _derived(
    part: str, value: str, one: Derivation, indent: str, style: str = ""
) -> Iterator[Text]:
    """The number, what its symbols are, and those of them that are derived in turn."""
    formula = one.formula.replace(" * ", " · ")
    yield Text.assemble(indent, (part, style), f" {value} = {formula}")
    inner = " " * len(indent)
    told = ", ".join(f"{name} {_shown(name, one)}" for name, one in one.symbols.items())
    if one.formula not in one.symbols:
        yield Text(f"{inner}{told}")
    if one.source:
        yield Text(f"{inner}({one.source})", "dim")
    for name, symbol in _nested(one.symbols):
        yield from _derived(name, _shown(name, symbol), symbol, f"{inner}  ")


def _nested(symbols: Mapping[str, Symbol]) -> Iterator[tuple[str, Derivation]]:
    for name, symbol in symbols.items():
        if isinstance(symbol, Derivation):
            yield name, symbol


def _shown(name: str, symbol: Symbol) -> str:
    """A value in the unit that its name ends with."""
    value = amount(symbol)
    if name == "mfu":
        return f"{value:.1%}"
    if name.endswith("bytes_per_s"):
        return f"{value / 1e9:,.4g} GB/s"
    if name.endswith("flops_per_s"):
        return f"{value / 1e12:,.4g} TFLOP/s"
    if name.endswith("_s"):
        return seconds(value)
    if name.endswith("_bytes"):
        if value < MIB_PER_GIB**2 / 10:
            return f"{value:,.6g} B"
        return size(value / GIB)
    if value == int(value) and value < 1e8:
        return f"{value:,.0f}"
    return f"{value:.4g}".replace("e+0", "e").replace("e+", "e")
