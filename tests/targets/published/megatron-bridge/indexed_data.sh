# Command of https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/scripts/training/README.md (library recipe, Megatron indexed data)
./scripts/training/train.sh \
    --nodes 1 --gpus-per-node 8 \
    --account ACCOUNT --partition PARTITION \
    --container-image /path/to/container.sqsh \
    --recipe llama32_1b_pretrain_config \
    --mode pretrain --dataset megatron-indexed \
    'dataset.data_path=[/data/dclm/part_1,/data/dclm/part_2]'
