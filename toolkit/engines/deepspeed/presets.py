"""Where the DeepSpeed presets of `ds_configs/` are, and which one a layout starts from."""

from pathlib import Path

from toolkit.layout import Layout

FOLDER = (Path(__file__).parents[2] / "ds_configs").resolve()
"""`ds_configs/` of the checkout (`toolkit/ds_configs` is a link to it); in an installed
package, the same files as package data."""

PRESETS = (
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero2_offload",
    "zero3_offload",
    "zero3_nvme",
    "zeropp",
)
"""Names of the shipped presets."""


def preset_path(name: str) -> Path:
    """File of a shipped preset; `name` is one of `PRESETS`."""
    assert name in PRESETS, name
    return FOLDER / f"{name}.json"


def preset_for(layout: Layout) -> str:
    """The preset that a layout starts from when the recipe names none.

    Offload presets are made for one stage each. For another combination of offload, stage and
    devices, it is the stage's plain preset, and the renderer adds the offload blocks.
    """
    offload = (layout.zero_stage, layout.offload_optimizer, layout.offload_parameters)
    complete = {
        (2, "cpu", "none"): "zero2_offload",
        (3, "cpu", "cpu"): "zero3_offload",
        (3, "nvme", "nvme"): "zero3_nvme",
    }
    return complete.get(offload, f"zero{layout.zero_stage}")
