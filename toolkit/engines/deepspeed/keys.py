"""Which keys DeepSpeed's config knows: a written-down list, so that `check` needs no DeepSpeed.

DeepSpeed drops unknown keys silently at the top level and in some blocks. The tests
compare these lists with the installed DeepSpeed's own classes.
"""

from collections.abc import Mapping

_TOP_LEVEL = """
    activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger
    communication_data_type compile csv_monitor data_efficiency data_types dataloader_drop_last
    datastates_ckpt disable_allgather disable_python_gc dump_state expert_parallel
    flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
    gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation
    memory_breakdown optimizer pipeline prescale_gradients scheduler
    seq_parallel_communication_data_type steps_per_print tensor_parallel tensorboard timers
    torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
    weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    zero_optimization
"""

_ZERO_SWITCHES = """
    allgather_partitions compute_grad_norm contiguous_gradients elastic_checkpoint
    enable_sanity_checks ignore_unused_parameters legacy_stage1 load_from_fp32_weights
    log_trace_cache_warnings memory_efficient_linear overlap_comm override_module_apply
    parameter_alignment pipeline_loading_checkpoint reduce_scatter round_robin_gradients
    save_muon_momentum_buffer_in_memory stage3_allgather_sequential
    stage3_gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params
    use_multi_rank_bucket_allreduce zero_quantized_gradients
    zero_quantized_nontrainable_weights zero_quantized_weights
"""

_ZERO_SIZES = """
    allgather_bucket_size reduce_bucket_size stage3_max_live_parameters
    stage3_max_reuse_distance stage3_model_persistence_threshold
    stage3_module_granularity_threshold stage3_param_persistence_threshold
    stage3_prefetch_bucket_size sub_group_size zero_hpz_partition_size
"""

_ZERO_BLOCKS = "leaf_module offload_optimizer offload_param zenflow"

_OFFLOAD_OPTIMIZER = """
    buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read
    pipeline_write ratio super_offload
"""

_AIO = """
    block_size intra_op_parallelism overlap_events queue_depth single_submit use_gds
"""

_FP16 = """
    auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis
    initial_scale_power loss_scale loss_scale_window min_loss_scale
"""

_BF16 = """
    bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled
    immediate_grad_update
"""

KNOWN_KEYS: Mapping[str, frozenset[str]] = {
    block: frozenset(names.split())
    for block, names in {
        "": _TOP_LEVEL,
        "aio": _AIO,
        "bf16": _BF16,
        "data_types": "buffer_dtype grad_accum_dtype keep_in_fp32_modules param_dtype",
        "fp16": _FP16,
        "optimizer": "legacy_fusion params type",
        "optimizer.params": "adam_w_mode betas eps foreach fused lr torch_adam weight_decay",
        "zero_optimization": " ".join((_ZERO_SWITCHES, _ZERO_SIZES, _ZERO_BLOCKS, "stage")),
        "zero_optimization.offload_optimizer": _OFFLOAD_OPTIMIZER,
        "zero_optimization.offload_param": (
            "buffer_count buffer_size device max_in_cpu nvme_path pin_memory"
        ),
    }.items()
}
"""Keys of each checked block; "" is the top level. `optimizer.params` holds those of AdamW.
Old spellings that DeepSpeed still translates (`cpu_offload`, …) are left out on purpose."""

ZERO_SWITCHES = frozenset(_ZERO_SWITCHES.split())
"""Keys of `zero_optimization` that are true or false."""
ZERO_SIZES = frozenset(_ZERO_SIZES.split())
"""Those that are integers of 0 or more."""
ZERO_POSITIVE = frozenset(("reduce_bucket_size",))
"""Those of the integers that may not be 0."""
