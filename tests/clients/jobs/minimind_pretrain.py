"""After minimind's train_pretrain.py: ``minimind_pretrain.py``, a Llama of its own, accumulation, GradScaler, DDP.

Runs on GPUs too, under torchrun. Tokens are random. It ends by itself, and saves as it does so.
"""

from __future__ import annotations

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WIDTH, LAYERS, HEADS, KEY_HEADS, HEAD, FFN, VOCABULARY, LENGTH = 512, 8, 8, 2, 64, 1408, 6400, 340
BATCH, ACCUMULATION, ITERATIONS, CLIP = 8, 4, 16, 1.0


class Texts(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return BATCH * ITERATIONS * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))


class RMSNorm(nn.Module):
    """Norm in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * normed.type_as(x)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of halves."""
    half = x.shape[-1] // 2
    return (x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Two heads of keys for eight of queries, repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k_proj = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.v_proj = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = rotated(self.q_proj(x).view(batch, length, HEADS, HEAD).transpose(1, 2), cos, sin)
        k = rotated(self.k_proj(x).view(batch, length, KEY_HEADS, HEAD).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(batch, length, KEY_HEADS, HEAD).transpose(1, 2)
        k, v = (t.repeat_interleave(HEADS // KEY_HEADS, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """Gated."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, FFN, bias=False)
        self.up_proj = nn.Linear(WIDTH, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MiniMindBlock(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), FeedForward()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class MiniMindForCausalLM(nn.Module):
    """The embedding's weight is the output layer's too."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MiniMindBlock() for _ in range(LAYERS))
        self.norm = RMSNorm()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.embed_tokens.weight = self.lm_head.weight
        angles = torch.outer(torch.arange(LENGTH), 1e6 ** (-torch.arange(0, HEAD, 2) / HEAD)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


def get_lr(step: int, total: int, lr: float) -> float:
    """A cosine to a tenth."""
    return lr * (0.1 + 0.45 * (1 + math.cos(math.pi * step / total)))


def main() -> None:
    """Train to the end of an epoch, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    options = parser.parse_args()
    dist.init_process_group(backend="nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = f"cuda:{local_rank}"
    torch.manual_seed(42 + dist.get_rank())
    dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float16
    model: nn.Module = MiniMindForCausalLM().to(device)
    scaler = torch.amp.GradScaler("cuda", enabled=options.dtype == "float16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    texts = Texts()
    sampler = DistributedSampler(texts)
    model = DistributedDataParallel(model, device_ids=[local_rank])
    loader = DataLoader(texts, batch_size=BATCH, sampler=sampler, num_workers=2, pin_memory=True)
    for step, tokens in enumerate(loader, start=1):
        input_ids = tokens.to(device)
        for param_group in optimizer.param_groups:
            param_group["lr"] = get_lr(step, ITERATIONS, 5e-4)
        with torch.amp.autocast("cuda", dtype=dtype):
            loss = model(input_ids, labels=input_ids) / ACCUMULATION
        scaler.scale(loss).backward()
        if step % ACCUMULATION == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            print(f"({step}/{ITERATIONS}), loss: {loss.item() * ACCUMULATION:.4f}")
    if dist.get_rank() == 0:
        model.eval()
        torch.save({name: value.half().cpu() for name, value in model.module.state_dict().items()}, "pretrain.pth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
