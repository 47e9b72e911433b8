"""The formulas of `dmt plan --explain`: why each number is as it is."""

from collections.abc import Iterator

from rich.text import Text

from toolkit.plan.cost.derivation import Derivation, Symbol, amount
from toolkit.plan.estimate import Derivations
from toolkit.text.units import GIB, MIB_PER_GIB, seconds

MIB = GIB // MIB_PER_GIB


def lines(found: Derivations) -> Iterator[Text]:
    """Each part of memory and time: its formula, the symbols' values, its source."""
    told: set[tuple[str, float, str]] = set()
    for what, parts, name in (
        ("memory", found.memory, "x_bytes"),
        ("time", found.time, "x_s"),
        ("MFU", {} if found.mfu is None else {"MFU": found.mfu}, "mfu"),
    ):
        if parts:
            yield Text(f"  why each number: {what}", "dim")
        for part, one in parts.items():
            yield from _derived(part, _shown(name, one.value), one, "  - ", told)


def _derived(
    part: str, value: str, one: Derivation, indent: str, told: set[tuple[str, float, str]]
) -> Iterator[Text]:
    """The number, what its symbols are, and those that are derived in turn, unless `told`."""
    if (this := (part, one.value, one.formula)) in told:
        return
    told.add(this)
    formula = one.formula.replace(" * ", " · ")
    yield Text.assemble(indent, (part, "bold" * ("-" in indent)), f" {value} = {formula}")
    inner = " " * len(indent)
    if one.formula not in one.symbols:
        values = (f"{name} {_shown(name, symbol)}" for name, symbol in one.symbols.items())
        yield Text(f"{inner}{', '.join(values)}")
    if one.source:
        yield Text(f"{inner}({one.source})", "dim")
    for name, symbol in one.symbols.items():
        if isinstance(symbol, Derivation):
            yield from _derived(name, _shown(name, symbol), symbol, f"{inner}  ", told)


def _shown(name: str, symbol: Symbol) -> str:
    """A value in the unit that its name ends with."""
    value = amount(symbol)
    if name == "mfu":
        return f"{value:.1%}"
    if not value:
        return "0"
    if name.endswith("bytes_per_s"):
        return f"{value / 1e9:,.4g} GB/s"
    if name.endswith("flops_per_s"):
        return f"{value / 1e12:,.4g} TFLOP/s"
    if name.endswith("_s"):
        return seconds(value)
    if name.endswith("_bytes"):
        for unit, unit_bytes in (("GiB", GIB), ("MiB", MIB)):
            if value >= unit_bytes:
                return f"{value / unit_bytes:,.4g} {unit}"
        return f"{value:,.6g} B"
    if value == int(value) and value < 1e8:
        return f"{value:,.0f}"
    return f"{value:.4g}".replace("e+0", "e").replace("e+", "e")
