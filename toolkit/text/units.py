"""Human-readable quantities and texts."""

MIB = 2**20
GIB = 2**30
MIB_PER_GIB = 1024


def shortened(text: str, longest: int) -> str:
    """The text, cut to at most so many letters. `…` stands for the rest."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def size(gib: float) -> str:
    """`75.80 GiB`, `1.2 MiB`."""
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * MIB_PER_GIB:.1f} MiB"


def seconds(value: float) -> str:
    """`288 s`, `4.14 s`, `35.0 ms`, `51.2 µs`: three digits, and no exponent."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, unit_s = next((one for one in units if value >= one[1]), units[-1])
    count = value / unit_s
    return f"{count:,.{0 if count >= 100 else 1 if count >= 10 else 2}f} {unit}"


def duration(value_s: float) -> str:
    """`0.25 s`, `36.0 s`, `4.2 min`, `7.5 h`, `12.3 days`, for times of any length."""
    for unit, unit_s in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if value_s >= 2 * unit_s:
            return f"{value_s / unit_s:,.1f} {unit}"
    return f"{value_s:.1f} s" if value_s >= 10 else f"{value_s:.2f} s"


def byte_size(count: int) -> str:
    """`12.3 GB`, `4.0 KB`: decimal units, as of files."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count} B"


def human(number: float) -> str:
    """1234567 → `1.23M`."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * limit:  # which three digits round up
            return f"{number / limit:.3g}{suffix}"
    return f"{number:g}"
