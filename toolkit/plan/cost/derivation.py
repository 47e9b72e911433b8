"""How a predicted number comes about: a formula, the values of its symbols, and its source.

`memory_derivation.py` and `time_derivation.py` state them. The cost model itself computes the
same numbers without them, for the many layouts of a search; `tests/plan/test_derivation.py`
evaluates every formula and compares.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Union

Symbol = Union[float, "Derivation"]


@dataclass(frozen=True)
class Derivation:
    """A number and its formula."""

    value: float
    """Bytes of memory, seconds, or whatever its name says."""
    formula: str
    """An expression in Python's syntax over the symbols."""
    symbols: Mapping[str, Symbol]
    """Values by name; some are derived in turn. Names end with the unit: `x_bytes`, `x_s`,
    `x_bytes_per_s`; others are plain numbers."""
    source: str = ""
    """A paper, a data sheet, or what a constant was calibrated with."""


def total(value: float, parts: Mapping[str, Symbol], source: str = "") -> Derivation:
    """A sum of the parts that are not zero; of a single derived one, its own derivation."""
    kept = {name: part for name, part in parts.items() if amount(part)}
    if len(kept) == 1 and isinstance(one := next(iter(kept.values())), Derivation):
        return one
    return Derivation(value, " + ".join(kept), kept, source)


def amount(symbol: Symbol) -> float:
    """The value of a symbol."""
    return symbol.value if isinstance(symbol, Derivation) else symbol
