"""Train with Lightning's Trainer: ``lightning_trainer.py --strategy fsdp --nodes 8``. Runs on GPUs too, under torchrun.

Its automatic optimization gives the optimizer a closure: forward and backward run inside of ``optimizer.step``.
"""

from __future__ import annotations

import argparse
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

HIDDEN, LAYERS, VOCABULARY, TOKENS, BATCH = 1024, 4, 8192, 512, 2


class Block(nn.TransformerEncoderLayer):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, 16, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)


class Texts(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(index))


class LanguageModel(pl.LightningModule):
    """A model as Lightning wants it."""

    def __init__(self, strategy: str) -> None:
        super().__init__()
        self.strategy_name = strategy
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def configure_model(self) -> None:
        """FSDP2, a unit a part; the other strategies wrap by themselves."""
        if self.strategy_name == "fsdp2":
            for part in (self.embed, *self.blocks, self.head):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), batch.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW and a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["ddp", "fsdp", "fsdp2", "zero2", "zero3"], default="ddp")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    strategies: dict[str, Any] = {
        "ddp": lambda: "ddp",
        "fsdp": lambda: FSDPStrategy(auto_wrap_policy={Block}),
        "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=8 * options.nodes, tensor_parallel_size=1),
        "zero2": lambda: DeepSpeedStrategy(stage=2, reduce_bucket_size=10_000_000),
        "zero3": lambda: DeepSpeedStrategy(stage=3, reduce_bucket_size=10_000_000),
    }
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=8,
        num_nodes=options.nodes,
        strategy=strategies[options.strategy](),
        precision="bf16-mixed" if options.strategy in ("ddp", "fsdp") else "bf16-true",
        max_steps=6,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=None if options.strategy == "fsdp" else 1.0,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(LanguageModel(options.strategy), DataLoader(Texts(), batch_size=BATCH, shuffle=True))


if __name__ == "__main__":
    main()
