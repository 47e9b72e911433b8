MODEL_ARGS="--num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 \
  --num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 64 \
  --num-experts 32 --moe-router-topk 4 --window-size 128,0 --softmax-type learnable \
  --position-embedding-type yarn --glu-linear-offset 1.0 --quick-geglu \
  --normalization RMSNorm --untie-embeddings-and-output-weights --padded-vocab-size 201088"
torchrun --nproc-per-node 8 pretrain_gpt.py $MODEL_ARGS --seq-length 4096 \
  --max-position-embeddings 40960 --micro-batch-size 1 --global-batch-size 64 \
  --train-iters 100 --lr 1e-5 --bf16
