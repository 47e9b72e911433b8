"""Quantities as people read them."""

import pytest

from toolkit.text.units import human, seconds


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


def test_human_numbers() -> None:
    assert [human(n) for n in (7, 1234, 1.5e6, 999_885_952, 8.03e9, 2e12)] == [
        "7", "1.23k", "1.5M", "1B", "8.03B", "2T",
    ]  # fmt: skip
