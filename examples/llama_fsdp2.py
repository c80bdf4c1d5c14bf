"""Train a Llama 3 with FSDP2, tensor parallelism and sequence parallelism on synthetic tokens.

    torchrun --nproc-per-node 8 examples/llama_fsdp2.py --model 8b --checkpoint full
    torchrun --nproc-per-node 2 examples/llama_fsdp2.py --model debug      # on CPUs, without a GPU

The model axis of the mesh (``tp``) spans one machine, the data axes (``dp_replicate``, ``dp_shard``) the others.
Parameters are float32, sharded; compute is bfloat16 and gradients are reduced in float32.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Llama 3; the defaults are shared by all of the 3.1 family."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int = 128_256
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads


MODELS = {
    "debug": ModelConfig(dim=256, num_layers=2, num_heads=16, num_kv_heads=8, ffn_dim=512, vocab_size=2_048),
    "8b": ModelConfig(dim=4_096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14_336),
    "70b": ModelConfig(dim=8_192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28_672),
    "405b": ModelConfig(dim=16_384, num_layers=126, num_heads=128, num_kv_heads=8, ffn_dim=53_248),
}


def rope_cache(config: ModelConfig, seq_len: int, device: torch.device | None = None) -> Tensor:
    """Rotations of every position, complex64, [seq_len, head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    angles = torch.outer(torch.arange(seq_len, device=device).float(), config.rope_theta**-exponents)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rope(heads: Tensor, rotations: Tensor) -> Tensor:
    """Rotate pairs of features by position; `heads` is [batch, seq_len, num_heads, head_dim]."""
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations[None, :, None, :]).flatten(3).type_as(heads)


class Attention(nn.Module):
    """Grouped-query attention. Under tensor parallelism each rank sees its own heads only."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        """Causal attention over [batch, seq_len, dim]."""
        batch_size, seq_len, _ = x.shape
        # -1 heads: the projections are sharded over the model axis, so the local number of heads is smaller.
        queries = apply_rope(self.wq(x).view(batch_size, seq_len, -1, self.head_dim), rotations)
        keys = apply_rope(self.wk(x).view(batch_size, seq_len, -1, self.head_dim), rotations)
        values = self.wv(x).view(batch_size, seq_len, -1, self.head_dim)
        out = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.wo(out.transpose(1, 2).reshape(batch_size, seq_len, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq_len, dim] to the same."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind an RMSNorm with a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        """[batch, seq_len, dim] to the same."""
        x = x + self.attention(self.attention_norm(x), rotations)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """A Llama 3 decoder."""

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.config = config
        self.seq_len = seq_len
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.register_buffer("rotations", rope_cache(config, seq_len), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, seq_len, vocab_size] of tokens [batch, seq_len]."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rotations)
        return self.output(self.norm(x))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fill parameters and buffers that `to_empty` left undefined."""
        for name, module in self.named_modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
            elif isinstance(module, nn.Linear):
                residual = name.endswith(("wo", "w2"))
                std = 0.02 / (2 * self.config.num_layers) ** 0.5 if residual else 0.02
                # Not trunc_normal_: it draws again what it rejects, and for that gathers the whole of a sharded weight.
                nn.init.normal_(module.weight, std=std)
        self.rotations = rope_cache(self.config, self.seq_len, device=self.rotations.device)


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh, *, shard_loss: bool) -> None:
    """Shard every block over the model axis; activations between blocks are sharded along the sequence."""
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if shard_loss else Replicate(),
                use_local_output=not shard_loss,
            ),
        },
    )
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


SAVED_OPERATIONS = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Keep attention, communication and every second matrix product; compute the rest again in backward."""
    num_matmuls = {"forward": 0, "recompute": 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation == torch.ops.aten.mm.default:
            pass_name = "recompute" if context.is_recompute else "forward"
            num_matmuls[pass_name] += 1
            if num_matmuls[pass_name] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operation in SAVED_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_checkpointing(model: Transformer, mode: str) -> None:
    """Wrap every block so that its activations are computed again in backward."""
    if mode == "none":
        return
    options = {"context_fn": selective_contexts} if mode == "selective" else {}
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False, **options)


def apply_fsdp(model: Transformer, mesh: DeviceMesh) -> None:
    """Shard parameters over the data axes, one group of parameters a block."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
    shard(model.tok_embeddings)
    for layer in model.layers:
        shard(layer)
    # The last group is needed again at once in backward, so it is not freed after forward.
    shard([model.norm, model.output], reshard_after_forward=False)
    shard(model)


def build_mesh(device_type: str, tp: int, dp_replicate: int) -> DeviceMesh:
    """A mesh of [dp_replicate,] dp_shard, tp over all ranks; dp_replicate is left out when it is 1."""
    world_size = dist.get_world_size()
    dp_shard, rest = divmod(world_size, tp * dp_replicate)
    if rest or not dp_shard:
        raise SystemExit(f"--tp {tp} and --dp-replicate {dp_replicate} do not divide {world_size} ranks")
    if dp_replicate == 1:
        return init_device_mesh(device_type, (dp_shard, tp), mesh_dim_names=("dp_shard", "tp"))
    axes = ("dp_replicate", "dp_shard", "tp")
    return init_device_mesh(device_type, (dp_replicate, dp_shard, tp), mesh_dim_names=axes)


def build_model(config: ModelConfig, mesh: DeviceMesh, device: torch.device, args: argparse.Namespace) -> Transformer:
    """Make the model on the meta device, shard it, and only then give it memory and weights."""
    with torch.device("meta"):
        model = Transformer(config, args.seq_len)
    if mesh["tp"].size() > 1:
        apply_tensor_parallel(model, mesh["tp"], shard_loss=args.loss_parallel)
    apply_checkpointing(model, args.checkpoint)
    hybrid = "dp_replicate" in (mesh.mesh_dim_names or ())
    apply_fsdp(model, mesh["dp_replicate", "dp_shard"] if hybrid else mesh["dp_shard"])
    model.to_empty(device=device)
    model.init_weights()
    return model


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss over all tokens, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    args: argparse.Namespace,
    loss_context: Callable[[], AbstractContextManager[Any]],
) -> tuple[float, float]:
    """Forward, backward, clip and update; gives the loss averaged over all ranks and the gradients' norm."""
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with loss_context():
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_norm, foreach=True)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size(), norm.item()


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Build everything and run `args.steps` steps."""
    torch.manual_seed(args.seed)
    mesh = build_mesh(device.type, args.tp, args.dp_replicate)
    config = MODELS[args.model]
    if args.num_layers:
        config = replace(config, num_layers=args.num_layers)
    if config.num_kv_heads % args.tp:
        raise SystemExit(f"--tp {args.tp} does not divide the {config.num_kv_heads} key and value heads")
    if args.seq_len % args.tp:
        raise SystemExit(f"--tp {args.tp} does not divide a sequence of {args.seq_len} tokens")
    model = build_model(config, mesh, device, args)
    options = {"fused": True} if args.optimizer == "fused" else {"foreach": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup_steps))
    shard_loss = args.loss_parallel and args.tp > 1
    loss_context = loss_parallel if shard_loss else nullcontext
    # Ranks that differ only on the model axis read the same tokens.
    generator = torch.Generator().manual_seed(args.seed + dist.get_rank() // args.tp)
    for step in range(1, args.steps + 1):
        tokens = torch.randint(config.vocab_size, (args.batch_size, args.seq_len + 1), generator=generator)
        loss, norm = train_step(model, optimizer, tokens.to(device), args, loss_context)
        schedule.step()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.4f}  grad norm {norm:.4f}", flush=True)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--num-layers", type=int, default=0, help="fewer or more blocks than the model has")
    parser.add_argument("--seq-len", type=int, default=8_192)
    parser.add_argument("--batch-size", type=int, default=1, help="sequences for each data-parallel rank")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tp", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), help="model axis")
    parser.add_argument("--dp-replicate", type=int, default=1, help="more than 1: HSDP with so many replicas")
    parser.add_argument("--checkpoint", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--loss-parallel", action="store_true", help="keep the logits sharded over the vocabulary")
    parser.add_argument("--optimizer", choices=("fused", "foreach"), default="fused")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Join the job, train, leave it."""
    args = parse_args()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        train(args, device)
        dist.barrier()  # gloo's threads may still hold tensors of the last collective; let them finish
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
