"""Quantities as people read them."""

MIB_PER_GIB = 1024


def size(gib: float) -> str:
    """`75.80 GiB`, `1.2 MiB`."""
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * MIB_PER_GIB:.1f} MiB"


def seconds(value: float) -> str:
    """`4.14 s`, `120.5 ms`."""
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def byte_size(count: int) -> str:
    """`12.3 GB`, `4.0 KB`: decimal units, as of files."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count} B"
