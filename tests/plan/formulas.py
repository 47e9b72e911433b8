"""What is asked of every formula of a plan."""

import re
from math import log, sqrt

import pytest

from toolkit.plan.cost.derivation import Derivation
from toolkit.plan.estimate import Estimate, derivations, memory_parts, time_parts
from toolkit.text.units import GIB

FUNCTIONS = {"__builtins__": {}, "max": max, "sqrt": sqrt, "log": log}


def evaluated(one: Derivation) -> float:
    """The value of a formula, its derived symbols evaluated, too; every symbol is used."""
    values = {
        name: evaluated(symbol) if isinstance(symbol, Derivation) else symbol
        for name, symbol in one.symbols.items()
    }
    assert {*re.findall(r"[a-z]\w*", one.formula)} - {*FUNCTIONS} == {*values}, one.formula
    assert 0 <= values.get("shape", 0) <= 1
    value = float(eval(one.formula, FUNCTIONS, values))
    assert value == pytest.approx(one.value, rel=1e-9), one
    return value


def check(found: Estimate) -> set[str]:
    """All parts that are not zero have a formula with their value; returns their names."""
    derived = derivations(found)
    memory = {part: size * GIB for part, size in memory_parts(found.memory).items() if size}
    time = {part: size for part, size in time_parts(found.time).items() if size}
    for parts, formulas in ((memory, derived.memory), (time, derived.time)):
        assert {part: evaluated(one) for part, one in formulas.items()} == pytest.approx(parts)
    if derived.mfu is not None:
        assert evaluated(derived.mfu) == pytest.approx(found.time.mfu_causal)
    return {*memory, *time}
