# Command of https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/scripts/training/README.md (overrides)
./scripts/training/train.sh \
    --nodes 1 --gpus-per-node 8 \
    --account ACCOUNT --partition PARTITION \
    --container-image /path/to/container.sqsh \
    --recipe llama32_1b_pretrain_config \
    --mode pretrain --dataset mock \
    -ms 10 -gb 8 -mb 1 \
    --lr 0.0002 --warmup_iters 1 \
    scheduler.lr_decay_iters=10
