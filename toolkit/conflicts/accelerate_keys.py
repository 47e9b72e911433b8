"""Which names Accelerate's config file knows: lists, so that nothing heavy is imported.

Accelerate refuses an unknown name at the top level and ignores one in a section without a
word. The tests compare these lists with the installed accelerate.
"""

_TOP_LEVEL = """
    command_file commands compute_environment debug deepspeed_config distributed_type
    downcast_bf16 dynamo_config enable_cpu_affinity fp8_config fsdp_config gpu_ids
    machine_rank main_process_ip main_process_port main_training_function megatron_lm_config
    mixed_precision mpirun_config num_machines num_processes parallelism_config rdzv_backend
    same_network tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone use_cpu
    dynamo_backend fp16
"""

TOP_LEVEL = frozenset(_TOP_LEVEL.split())
"""Fields of its ClusterConfig, and the two older spellings that it still translates."""

SECTIONS = {
    section: frozenset(names.split())
    for section, names in {
        "deepspeed_config": """
            deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile
            deepspeed_inclusion_filter deepspeed_moe_layer_cls_names
            deepspeed_multinode_launcher gradient_accumulation_steps gradient_clipping
            offload_optimizer_device offload_optimizer_nvme_path offload_param_device
            offload_param_nvme_path zero3_init_flag zero3_save_16bit_model zero_stage
        """,
        "fsdp_config": """
            fsdp_activation_checkpointing fsdp_activation_checkpointing_offload
            fsdp_auto_wrap_policy fsdp_backward_prefetch fsdp_cpu_ram_efficient_loading
            fsdp_forward_prefetch fsdp_min_num_params fsdp_offload_params
            fsdp_reshard_after_forward fsdp_sharding_strategy fsdp_state_dict_type
            fsdp_sync_module_states fsdp_transformer_layer_cls_to_wrap fsdp_use_orig_params
            fsdp_version
        """,
        "fp8_config": """
            fp8_amax_compute_algo fp8_amax_history_len fp8_backend
            fp8_enable_fsdp_float8_all_gather fp8_format fp8_interval fp8_margin
            fp8_opt_level fp8_override_linear_precision fp8_pad_inner_dim
            fp8_use_autocast_during_eval
        """,
        "parallelism_config": """
            parallelism_config_cp_backend parallelism_config_cp_comm_strategy
            parallelism_config_cp_size parallelism_config_dp_replicate_size
            parallelism_config_dp_shard_size parallelism_config_sp_attn_implementation
            parallelism_config_sp_backend parallelism_config_sp_seq_length
            parallelism_config_sp_seq_length_is_variable parallelism_config_sp_size
            parallelism_config_tp_size
        """,
        "megatron_lm_config": """
            megatron_lm_attention_backend megatron_lm_attention_dropout
            megatron_lm_attention_softmax_in_fp32 megatron_lm_calculate_per_token_loss
            megatron_lm_context_parallel_size megatron_lm_decoder_last_pipeline_num_layers
            megatron_lm_eod_mask_loss megatron_lm_expert_model_parallel_size
            megatron_lm_expert_tensor_parallel_size megatron_lm_gradient_clipping
            megatron_lm_hidden_dropout megatron_lm_no_load_optim megatron_lm_no_save_optim
            megatron_lm_num_micro_batches megatron_lm_optimizer_cpu_offload
            megatron_lm_overlap_cpu_optimizer_d2h_h2d megatron_lm_pp_degree
            megatron_lm_recompute_activations megatron_lm_recompute_granularity
            megatron_lm_recompute_method megatron_lm_recompute_num_layers
            megatron_lm_sequence_parallelism megatron_lm_tp_degree
            megatron_lm_use_custom_fsdp megatron_lm_use_distributed_optimizer
            megatron_lm_use_precision_aware_optimizer
            megatron_lm_use_rotary_position_embeddings
        """,
        "mpirun_config": """
            mpirun_hostfile
        """,
        "dynamo_config": """
            dynamo_backend dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph
            dynamo_use_regional_compilation
        """,
    }.items()
}
"""Arguments of `accelerate launch` that each section sets."""
