"""After diffusers' train_unconditional and train_dit: ``diffusers_train.py --model unet|dit``, with an EMA, Accelerate.

Runs on GPUs too, under torchrun. Pictures are random.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, DiTTransformer2DModel, ModelMixin, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader, Dataset

BATCH, STEPS, CLASSES = 16, 6, 1000


class Pictures(Dataset[dict[str, torch.Tensor]]):
    """Noise: of 64 x 64 pixels, or latents of 32 x 32."""

    def __init__(self, channels: int, size: int) -> None:
        self.shape = (channels, size, size)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"input": torch.randn(self.shape, generator=generator), "label": torch.tensor(index % CLASSES)}


def unet() -> UNet2DModel:
    """The network of train_unconditional, half as wide."""
    return UNet2DModel(
        sample_size=64,
        in_channels=3,
        out_channels=3,
        layers_per_block=2,
        block_out_channels=(64, 64, 128, 128, 256, 256),
        down_block_types=("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
    )


def dit() -> DiTTransformer2DModel:
    """DiT-B/2 of four layers; not its sigma."""
    return DiTTransformer2DModel(
        num_attention_heads=12, attention_head_dim=64, num_layers=4, sample_size=32, in_channels=4, out_channels=4
    )


def predicted(model: ModelMixin, noisy: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The noise that the model sees."""
    if isinstance(labels, torch.Tensor) and noisy.shape[1] == 4:
        return model(noisy, timestep=timesteps, class_labels=labels).sample
    return model(noisy, timesteps).sample


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["unet", "dit"], default="unet")
    options = parser.parse_args()
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=1)
    model = unet() if options.model == "unet" else dit()
    ema_model = EMAModel(
        model.parameters(),
        decay=0.9999,
        use_ema_warmup=True,
        inv_gamma=1.0,
        power=0.75,
        model_cls=type(model),
        model_config=model.config,
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000, beta_schedule="linear")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8)
    pictures = Pictures(3, 64) if options.model == "unet" else Pictures(4, 32)
    loader = DataLoader(pictures, batch_size=BATCH, shuffle=True)
    schedule = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=500, num_training_steps=10_000)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    ema_model.to(accelerator.device)
    for step, batch in enumerate(loader):
        clean = batch["input"]
        noise = torch.randn(clean.shape, device=clean.device)
        timesteps = torch.randint(0, 1000, (clean.shape[0],), device=clean.device).long()
        noisy = noise_scheduler.add_noise(clean, noise, timesteps)
        with accelerator.accumulate(model):
            loss = F.mse_loss(predicted(model, noisy, timesteps, batch["label"]).float(), noise.float())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema_model.step(model.parameters())
            accelerator.print(f"step {step} loss {loss.detach().item():.3f} ema decay {ema_model.cur_decay_value:.4f}")
        if step + 1 == STEPS:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
