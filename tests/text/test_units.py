"""Quantities as people read them."""

import pytest

from toolkit.text.units import seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0000512, "51.2 µs"),
        (0.0354, "35.4 ms"),
        (0.035, "35.0 ms"),
        (0.9999, "1,000 ms"),
        (4.137, "4.14 s"),
        (12.04, "12.0 s"),
        (287.9, "288 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text
