"""After SAM 2's training/trainer.py: the model and the loss of its own fine-tuning configuration, bf16, DDP.

Runs on GPUs too, under torchrun. Weights and videos are random, of 512 pixels where the configuration has 1,024. The
number of clicks and of frames that get some are drawn in each step, as the recipe draws them.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import sam2
import torch
import torch.distributed as dist
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch.nn.parallel import DistributedDataParallel
from training.utils.data_utils import BatchedVideoDatapoint, BatchedVideoMetaData

CONFIG = Path(sam2.__file__).parent / "configs/sam2.1_training/sam2.1_hiera_b+_MOSE_finetune.yaml"
PIXELS, FRAMES, OBJECTS, STEPS, CLIP = 512, 8, 3, 6, 0.1


def video(device: torch.device) -> BatchedVideoDatapoint:
    """A video of one sample, with a rectangle for each object."""
    masks = torch.zeros(FRAMES, OBJECTS, PIXELS, PIXELS, dtype=torch.bool)
    for number in range(OBJECTS):
        masks[:, number, 50 * number : 50 * number + 200, 100:400] = True
    frames = torch.arange(FRAMES, dtype=torch.int32)[:, None].expand(FRAMES, OBJECTS)
    return BatchedVideoDatapoint(
        img_batch=torch.randn(FRAMES, 1, 3, PIXELS, PIXELS),
        obj_to_frame_idx=torch.stack([frames, torch.zeros_like(frames)], dim=-1),
        masks=masks,
        metadata=BatchedVideoMetaData(
            unique_objects_identifier=torch.zeros(FRAMES, OBJECTS, 3, dtype=torch.long),
            frame_orig_size=torch.full((FRAMES, OBJECTS, 2), PIXELS),
            batch_size=[FRAMES],
        ),
        dict_key="all",
        batch_size=[FRAMES],
    ).to(device)


def main() -> None:
    """Train for some steps."""
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(123 + dist.get_rank())
    OmegaConf.register_new_resolver("times", lambda x, y: x * y)
    OmegaConf.register_new_resolver("divide", lambda x, y: x / y)
    recipe = OmegaConf.load(CONFIG)
    recipe.scratch.resolution = PIXELS
    model = instantiate(recipe.trainer.model, _convert_="all").to(device)
    loss_fn = instantiate(recipe.trainer.loss["all"], _convert_="all").to(device)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    model = DistributedDataParallel(model, device_ids=[local_rank], find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-6, weight_decay=0.1)
    for step in range(STEPS):
        batch = video(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            outputs = model(batch)
            losses = loss_fn(outputs, batch.masks)
        losses["core_loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        print(f"step {step}: loss {losses['core_loss'].item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
