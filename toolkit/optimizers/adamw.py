"""AdamW with fp32 moments: every engine has its own (`engines/optimizer.py`)."""

from toolkit.optimizers.base import Ledger, OptimizerKind

ADAMW = OptimizerKind(
    title="AdamW",
    reference="toolkit.rehearse.reference:adamw",
    ledger=Ledger("AdamW with fp32 weights and moments"),
    aliases=("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "fusedadam"),
    elsewhere={
        "deepspeed.json": "AdamW",
        "TrainingArguments": "adamw_torch",
    },
)
"""`optimizer.name: adamw`."""
