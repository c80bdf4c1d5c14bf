"""Three published large jobs, with the flags that their users give to Megatron-LM: sizes, layout, switches.

Each needs its own number of ranks (WORLD_SIZE) and is one command line of ``pretrain_gpt.py``. Flags that do not change
what one rank computes and holds (data files, logging, checkpoints) are left out.
"""

from __future__ import annotations

import shlex

#: What the three have in common.
_COMMON = """
    --use-distributed-optimizer --sequence-parallel --disable-bias-linear --bf16
    --transformer-impl transformer_engine --mock-data --tokenizer-type NullTokenizer --vocab-size 32000
    --untie-embeddings-and-output-weights --position-embedding-type rope --normalization RMSNorm --swiglu
    --seq-length 4096 --max-position-embeddings 4096 --attention-dropout 0.0 --hidden-dropout 0.0
    --clip-grad 1.0 --weight-decay 0.1 --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95
    --micro-batch-size 1 --log-num-zeros-in-grad --log-params-norm
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-force-load-balancing
"""

_MIXTRAL_8X7B = """
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
    --num-virtual-stages-per-pipeline-rank 8 --global-batch-size 256
    --overlap-grad-reduce --overlap-param-gather
    --train-samples 32768 --rotary-percent 1.0
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --make-vocab-size-divisible-by 128
    --lr-decay-samples 255126953 --lr-warmup-samples 162761 --lr 1.2e-5 --min-lr 1.2e-6
    --num-experts 8 --moe-router-load-balancing-type aux_loss --moe-router-topk 2 --moe-aux-loss-coeff 1e-3
    --init-method-std 0.008
"""

_QWEN3_235B = """
    --distributed-timeout-minutes 60
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 --expert-model-parallel-size 32
    --num-virtual-stages-per-pipeline-rank 4 --context-parallel-size 1 --expert-tensor-parallel-size 1
    --global-batch-size 2048 --no-create-attention-mask-in-dataloader
    --train-samples 32768 --rotary-percent 1.0 --rotary-base 1000000 --rotary-seq-len-interpolation-factor 1
    --norm-epsilon 1e-06
    --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288
    --num-attention-heads 64 --group-query-attention --num-query-groups 4 --qk-layernorm
    --make-vocab-size-divisible-by 1187
    --lr-decay-samples 255126953 --lr-warmup-samples 162761 --lr 1.2e-4 --min-lr 1.2e-5
    --num-experts 128 --moe-ffn-hidden-size 1536 --moe-router-load-balancing-type aux_loss --moe-router-topk 8
    --moe-router-pre-softmax --moe-aux-loss-coeff 1e-3 --moe-permute-fusion
    --init-method-std 0.02
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
"""

_DEEPSEEK_V3 = """
    --distributed-timeout-minutes 60
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 16 --expert-model-parallel-size 64
    --context-parallel-size 1 --expert-tensor-parallel-size 1
    --pipeline-model-parallel-layout 'Et*3|(tt|)*29|L' --global-batch-size 8192
    --overlap-grad-reduce --overlap-param-gather
    --no-create-attention-mask-in-dataloader --train-samples 524288
    --no-check-for-nan-in-loss-and-grad --no-rope-fusion --manual-gc --manual-gc-interval 1
    --num-layers 61 --moe-layer-freq '([0]*3+[1]*58)' --hidden-size 7168 --ffn-hidden-size 18432
    --num-attention-heads 128 --kv-channels 128 --rotary-base 10000 --make-vocab-size-divisible-by 3232
    --norm-epsilon 1e-6 --multi-latent-attention --qk-layernorm
    --lr-decay-samples 524288 --lr-warmup-samples 8192 --lr-warmup-init 3.9e-7 --lr 3.9e-6 --min-lr 3.9e-7
    --num-experts 256 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8 --moe-router-pre-softmax
    --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4 --moe-router-num-groups 8
    --moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --moe-permute-fusion
    --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
    --init-method-std 0.02
    --recompute-granularity selective --recompute-modules moe_act mlp layernorm mla_up_proj
    --fp8-format e4m3 --fp8-recipe blockwise
"""

#: Number of ranks of the job, and its command line.
PRESETS: dict[str, tuple[int, list[str]]] = {
    "mixtral-8x7b": (64, shlex.split(_COMMON + _MIXTRAL_8X7B)),
    "qwen3-235b": (256, shlex.split(_COMMON + _QWEN3_235B)),
    "deepseek-v3": (1024, shlex.split(_COMMON + _DEEPSEEK_V3)),
}
