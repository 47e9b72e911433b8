OPTIONS=" \
  --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm \
  --seq-length 4096 --max-position-embeddings 40960 --position-embedding-type rope \
  --rotary-base 1000000 --swiglu --normalization RMSNorm --norm-epsilon 1e-6 \
  --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --padded-vocab-size 151936 \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-4B"
MBS=${MBS:-2}
GBS=$((MBS * 64))
torchrun --nproc_per_node=8 pretrain_gpt.py $OPTIONS --micro-batch-size $MBS \
  --global-batch-size ${GBS} --train-iters=1_000 --lr-warmup-iters 50 --lr 3e-4 \
  --min-lr 3e-5 --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 100 \
  --bf16 --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer \
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
  --data-path /data/text --split 98,2,0 --eval-interval 100 --save-interval 500 --seed 7
