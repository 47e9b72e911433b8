#!/bin/bash
TOKENIZER_MODEL=$2
MODEL_ARGS=(
    --use-mcore-models
    --disable-bias-linear
    --seq-length 4096
    --max-position-embeddings 32768
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --init-method-std 0.01
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --normalization RMSNorm
    --position-embedding-type rope
    --swiglu
    --untie-embeddings-and-output-weights
    --group-query-attention
    --num-query-groups 8
    --rotary-base 1000000
    --padded-vocab-size 32000
)
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss # options: aux_loss, sinkhorn
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)
DATA_ARGS=(
    --tokenizer-type Llama2Tokenizer
    --tokenizer-model mistralai/Mixtral-8x7B-v0.1
    --data-path 0.7 /data/a_text_document 0.3 /data/b_text_document
    --split 99990,8,2
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 256
    --lr 1e-4 --train-iters 500000 --lr-decay-iters 500000 --lr-decay-style cosine
    --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16
)
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${DATA_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 \
    --expert-model-parallel-size 8 --use-distributed-optimizer \
    --wandb-project ${WANDB_PROJECT:-"Mixtral"} --wandb-exp-name ${WANDB_NAME:-"Mixtral_8x7B"}
