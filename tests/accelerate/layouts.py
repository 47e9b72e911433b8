"""Layouts that files for Accelerate describe."""

LAYOUTS: dict[str, dict[str, object]] = {
    "ddp": {"engine": "ddp"},
    "zero0": {"engine": "deepspeed", "zero.stage": 0},
    "zero1": {"engine": "deepspeed", "zero.stage": 1},
    "zero2": {"engine": "deepspeed", "zero.stage": 2},
    "zero3": {"engine": "deepspeed", "zero.stage": 3},
    "zero2 offload": {"engine": "deepspeed", "zero.stage": 2, "zero.offload_optimizer": "cpu"},
    "zero3 nvme": {
        "engine": "deepspeed",
        "zero.stage": 3,
        "zero.offload_optimizer": "nvme",
        "zero.offload_parameters": "nvme",
        "zero.nvme_path": "'/local nvme: {x} #1'",
    },
    "fsdp": {"engine": "fsdp", "zero.stage": 3, "zero.offload_parameters": "cpu"},
    "fsdp, gathered once": {"engine": "fsdp", "zero.stage": 2, "recompute": "full"},
}
