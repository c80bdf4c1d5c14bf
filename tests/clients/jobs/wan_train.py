"""After diffusers' guide of context parallelism: Wan 2.1's transformer, its sequence split over the ranks, trained.

Runs on GPUs too, under torchrun. Four layers of the 1.3B model; Ulysses splits heads and sequence over four ranks.
Latents of 17 frames of 480 x 832 and texts are random, the loss is flow matching's.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, WanTransformer3DModel
from torch.nn.parallel import DistributedDataParallel

STEPS, FRAMES, HEIGHT, WIDTH, TEXT = 6, 5, 60, 104, 512


def main() -> None:
    """Train for some steps."""
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(0)  # ranks share a sample
    wan = WanTransformer3DModel(
        num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=4, text_dim=4096
    ).to(device, torch.bfloat16)
    wan.enable_parallelism(config=ContextParallelConfig(ulysses_degree=dist.get_world_size()))
    print(f"{sum(parameter.numel() for parameter in wan.parameters()):,} parameters")
    model = DistributedDataParallel(wan, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for step in range(STEPS):
        latents = torch.randn(1, 16, FRAMES, HEIGHT, WIDTH, device=device, dtype=torch.bfloat16)
        text = torch.randn(1, TEXT, 4096, device=device, dtype=torch.bfloat16)
        noise = torch.randn_like(latents)
        sigma = torch.rand(1, device=device, dtype=torch.bfloat16)
        noisy = (1 - sigma) * latents + sigma * noise
        (velocity,) = model(noisy, timestep=1000 * sigma, encoder_hidden_states=text, return_dict=False)
        loss = torch.nn.functional.mse_loss(velocity.float(), (noise - latents).float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
