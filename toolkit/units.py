"""Quantities as people read them."""

MIB_PER_GIB = 1024


def size(gib: float) -> str:
    """`75.80 GiB`, `1.2 MiB`."""
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * MIB_PER_GIB:.1f} MiB"


def seconds(value: float) -> str:
    """`4.14 s`, `120.5 ms`."""
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


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
