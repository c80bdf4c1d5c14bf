"""After minGPT-ddp of PyTorch's examples: characters, mixed precision with a GradScaler, snapshots, torchrun."""

from __future__ import annotations

import io
import math
import os
import string
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class GPTConfig:
    n_layer: int = 8
    n_head: int = 8
    n_embd: int = 512
    vocab_size: int = len(string.printable)
    block_size: int = 128
    embd_pdrop: float = 0.1
    resid_pdrop: float = 0.1
    attn_pdrop: float = 0.1


class MultiheadAttentionLayer(nn.Module):
    """torch's attention behind a causal mask."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.resid_drop = nn.Dropout(config.resid_pdrop)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        size = config.block_size
        self.register_buffer("mask", torch.tril(torch.ones(size, size)).view(1, 1, size, size))
        self.attn = nn.MultiheadAttention(config.n_embd, config.n_head, dropout=config.attn_pdrop, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, seq_size, _ = x.size()
        y = self.attn(x, x, x, attn_mask=self.mask[0, 0, :seq_size, :seq_size])[0]
        return self.resid_drop(self.c_proj(y))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.n_embd)
        self.ln2 = nn.LayerNorm(config.n_embd)
        self.attn = MultiheadAttentionLayer(config)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
            nn.Dropout(config.resid_pdrop),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class EmbeddingStem(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(config.vocab_size, config.n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.block_size, config.n_embd))
        self.drop = nn.Dropout(config.embd_pdrop)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        return self.drop(self.tok_emb(idx) + self.pos_emb[:, : idx.size(1), :])


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.block_size = config.block_size
        self.emb_stem = EmbeddingStem(config)
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                parameter.data.normal_(mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))
        print(f"number of parameters: {sum(p.numel() for p in self.blocks.parameters()) / 1e6:.2f}M")

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.ln_f(self.blocks(self.emb_stem(idx))))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class CharDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Characters of a text of our own."""

    def __init__(self, block_size: int) -> None:
        text = (string.ascii_letters + string.digits + " ,.") * 2000
        self.stoi = {character: number for number, character in enumerate(string.printable)}
        self.block_size, self.data = block_size, text

    def __len__(self) -> int:
        return len(self.data) - self.block_size

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        encoded = [self.stoi[one] for one in self.data[idx : idx + self.block_size + 1]]
        return torch.tensor(encoded[:-1], dtype=torch.long), torch.tensor(encoded[1:], dtype=torch.long)


def create_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; no decay of biases, norms and embeddings."""
    decay = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))


class Trainer:
    """Epochs with mixed precision."""

    def __init__(self, model: nn.Module, train_dataset: CharDataset, batch_size: int) -> None:
        self.local_rank, self.global_rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.train_loader = DataLoader(
            train_dataset, batch_size=batch_size, pin_memory=True, sampler=DistributedSampler(train_dataset)
        )
        self.optimizer = create_optimizer(model)
        self.scaler = torch.amp.GradScaler("cuda")
        self.model = DistributedDataParallel(model.to(self.local_rank), device_ids=[self.local_rank])

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor) -> float:
        with torch.set_grad_enabled(True), torch.amp.autocast("cuda", dtype=torch.float16):
            _, loss = self.model(source, targets)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def _save_snapshot(self, epoch: int) -> None:
        snapshot: dict[str, Any] = {
            "model_state": self.model.module.state_dict(),
            "optimizer_state": self.optimizer.state_dict(),
            "finished_epoch": epoch,
        }
        torch.save(snapshot, io.BytesIO())
        print(f"Snapshot saved at epoch {epoch}")

    def train(self, max_epochs: int) -> None:
        for epoch in range(max_epochs):
            self.train_loader.sampler.set_epoch(epoch)
            for iteration, (source, targets) in enumerate(self.train_loader):
                loss = self._run_batch(source.to(self.local_rank), targets.to(self.local_rank))
                if iteration % 100 == 0:
                    print(f"[RANK{self.global_rank}] Epoch {epoch} | Iter {iteration} | Train Loss {loss:.5f}")
            if self.local_rank == 0:
                self._save_snapshot(epoch)


def main() -> None:
    init_process_group(backend="nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    config = GPTConfig()
    print(asdict(config))
    Trainer(GPT(config), CharDataset(config.block_size), batch_size=216).train(max_epochs=1)
    destroy_process_group()


if __name__ == "__main__":
    main()
