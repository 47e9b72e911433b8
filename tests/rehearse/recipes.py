"""Settings of recipes that tests rehearse."""

INTERLEAVED = [
    "parallel.engine=megatron", "parallel.pipeline=3", "parallel.virtual_pipeline=2",
    "model.config.num_hidden_layers=6", "training.global_batch_size=24",
    "parallel.zero.stage=auto", "cluster.gpus_per_node=3",
]  # fmt: skip
