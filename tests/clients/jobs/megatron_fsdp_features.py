"""Train under Megatron-FSDP, one feature after the other: ``megatron_fsdp_features.py --replicas 2 --accumulate 3``.

Runs as it is on a GPU too. ``--recipe`` takes Transformer Engine's layers and its fp8, ``--quantized`` has their
weights in fp8 and gathers them so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

HEADS, LAYERS, TOKENS, BATCH = 16, 4, 512, 2
RECIPES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def plain(options: argparse.Namespace) -> tuple[nn.Module, list[Any], Any]:
    """torch's own layers: the model, its units, and what forward runs under."""
    hidden = options.hidden
    model = nn.Sequential(*(Block(hidden) for _ in range(LAYERS)), nn.Linear(hidden, hidden))
    return model.to(torch.bfloat16), [Block], contextlib.nullcontext


def engine(options: argparse.Namespace) -> tuple[nn.Module, list[Any], Any]:
    """The same of Transformer Engine's."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    recipe = getattr(recipes, RECIPES[options.recipe])() if options.recipe != "bf16" else None
    hidden = options.hidden
    more = {"params_dtype": torch.bfloat16, "device": "meta" if options.meta else "cuda"}
    with te.quantized_model_init(enabled=options.quantized, recipe=recipe, preserve_high_precision_init_val=True):
        layers = [te.TransformerLayer(hidden, 4 * hidden, HEADS, fuse_qkv_params=True, **more) for _ in range(LAYERS)]
        model = nn.Sequential(*layers, te.Linear(hidden, hidden, **more))
    return model, [te.TransformerLayer, te.Linear], lambda: te.autocast(enabled=recipe is not None, recipe=recipe)


def sharded(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Any]]:
    """The model in its shards, its optimizer, and what forward runs under."""
    mesh = init_device_mesh(
        "cuda", (options.replicas, dist.get_world_size() // options.replicas, 1), mesh_dim_names=("outer", "dp", "tp")
    )
    hybrid: dict[str, Any] = {}
    if options.replicas > 1:
        group = mesh["outer", "dp"]._flatten("hybrid").get_group()
        hybrid = {"dp_outer_dim": "outer", "hybrid_fsdp_group": group, "outer_dp_sharding_strategy": options.outer}
    with torch.device("meta" if options.meta else "cuda"):
        model, units, context = (engine if options.recipe else plain)(options)
    model = fully_shard_model(
        model,
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=units,
        zero_dp_strategy=options.strategy,
        init_model_with_meta_device=options.meta,
        mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16),
        keep_fp8_transpose_cache=options.quantized,
        fsdp_double_buffer=options.double_buffer,
        sync_model_each_microbatch=options.accumulate == 1,
        **hybrid,
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    return model, optimizer, context


def step(made: tuple[nn.Module, torch.optim.Optimizer, Callable[[], Any]], options: argparse.Namespace) -> float:
    """One step of some micro-batches; gives the last loss."""
    model, optimizer, context = made
    for micro_batch in range(options.accumulate):
        if options.accumulate > 1:
            model.set_model_auto_sync(micro_batch == options.accumulate - 1)
        x = torch.randn(TOKENS, BATCH, options.hidden, device="cuda", dtype=torch.bfloat16)
        with context():
            loss = model(x).float().square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main() -> None:
    """Train; save and load where that is asked for, and train on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="optim_grads_params")
    parser.add_argument("--replicas", type=int, default=1, help="of the shards: hybrid sharding")
    parser.add_argument("--outer", default="no_shard", help="optim shards the optimizer over replicas too")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--recipe", choices=["bf16", *RECIPES], help="Transformer Engine's layers, and their recipe")
    parser.add_argument("--quantized", action="store_true", help="weights in fp8")
    parser.add_argument("--meta", action="store_true", help="never hold a whole model, not even at first")
    parser.add_argument("--double-buffer", action="store_true")
    parser.add_argument("--checkpoint", help="a directory, to save to and load from")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.checkpoint else "nccl")
    made = sharded(options)
    for number in range(1, options.steps + 1):
        print(f"step {number} loss {step(made, options):.3f}", flush=True)
        if options.checkpoint and number == 1:
            save_and_load(made, options.checkpoint)
    dist.destroy_process_group()
    print("trained")


def save_and_load(made: tuple[nn.Module, torch.optim.Optimizer, Any], directory: str) -> None:
    """As the documentation of Megatron-FSDP does it."""
    model, optimizer, _ = made
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=directory)
    kept = [parameter.to_local().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
    loaded = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(loaded, checkpoint_id=directory)
    model.load_state_dict(loaded["model"], strict=False)
    optimizer.load_state_dict(loaded["optimizer"])
    pairs = zip(model.parameters(), kept, strict=True)
    same = [torch.equal(parameter.to_local(), was) for parameter, was in pairs if was.numel()]
    if not same or not all(same):
        raise RuntimeError(f"{same.count(False)} of {len(same)} parts are not as they were")
    print(f"{len(same)} parts as they were", flush=True)


if __name__ == "__main__":
    main()
