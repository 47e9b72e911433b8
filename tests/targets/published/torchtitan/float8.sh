# Command of https://github.com/pytorch/torchtitan/blob/v0.2.0/docs/float8.md (tensorwise scaling)
CONFIG_FILE="./torchtitan/models/llama3/train_configs/llama3_8b.toml" ./run_train.sh --model.converters="float8" --float8.enable_fsdp_float8_all_gather --float8.precompute_float8_dynamic_scale_for_fsdp --float8.force_recompute_fp8_weight_in_bwd --compile.enable
