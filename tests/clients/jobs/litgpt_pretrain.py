"""LitGPT's own ``litgpt pretrain``, its ``setup`` called as its command line does: pythia-14m's shape, random weights.

Runs on GPUs too, under torchrun. The data are random tokens, and the tokenizer is not needed.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from litgpt.args import EvalArgs, LogArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from litgpt.pretrain import setup
from torch.utils.data import DataLoader, Dataset

LENGTH, VOCABULARY = 512, 8192


class Tokens(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))


@dataclass
class Random(DataModule):
    """Random tokens for training and validation."""

    batch_size: int = 1

    def connect(self, tokenizer: object = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Tokens(), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Tokens(), batch_size=self.batch_size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    options = parser.parse_args()
    setup(
        model_name="pythia-14m",
        model_config=Config(
            name="recipe",
            block_size=LENGTH,
            padded_vocab_size=VOCABULARY,
            n_layer=4,
            n_head=16,
            n_embd=1024,
            n_query_groups=4,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            intermediate_size=2816,
        ),
        out_dir=Path("out").absolute(),
        precision="bf16-mixed",
        data=Random(),
        train=TrainArgs(
            save_interval=1000,
            log_interval=1,
            global_batch_size=4 * options.devices,
            micro_batch_size=2,
            max_tokens=6 * 4 * options.devices * LENGTH,
            lr_warmup_steps=2,
            max_seq_length=LENGTH,
            max_norm=1.0,
        ),
        eval=EvalArgs(interval=1000, max_iters=2, initial_validation=False),
        log=LogArgs(),
        optimizer="AdamW",
        devices=options.devices,
        num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // options.devices,
        logger_name="csv",
        seed=42,
    )


if __name__ == "__main__":
    main()
