"""After SiT's train.py: ``sit_train.py``, SiT-B/2 of four layers on latents of a VAE, an EMA, DDP.

Runs on GPUs too, under torchrun. Layers are timm's, as SiT takes them; the VAE is diffusers', with random weights;
pictures are random.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy

import torch
import torch.distributed as dist
from diffusers.models import AutoencoderKL
from timm.models.vision_transformer import Attention, Mlp, PatchEmbed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
WIDTH, DEPTH, HEADS, CLASSES, SIZE, BATCH, STEPS, LOG_EVERY = 768, 4, 12, 1000, 256, 8, 6, 2


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Noise of 256 x 256 pixels."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(index)), index % CLASSES


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Shift and scale each picture's tokens."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    """Sines of the time, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        freqs = torch.exp(-9.21034 * torch.arange(128, dtype=torch.float32) / 128).to(t.device)
        args = t[:, None].float() * freqs[None]
        return self.mlp(torch.cat([torch.cos(args), torch.sin(args)], dim=-1))


class LabelEmbedder(nn.Module):
    """Classes, and one for none: a tenth of the labels are dropped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(CLASSES + 1, width)

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        drop = torch.rand(labels.shape[0], device=labels.device) < 0.1
        return self.embedding_table(torch.where(drop, CLASSES, labels))


class SiTBlock(nn.Module):
    """Attention and MLP, modulated by the condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(width, num_heads=HEADS, qkv_bias=True)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(width, 4 * width, act_layer=lambda: nn.GELU(approximate="tanh"), drop=0)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width, bias=True))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        return x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class FinalLayer(nn.Module):
    """Tokens to patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, 2 * 2 * 8)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class SiT(nn.Module):
    """A transformer over patches of 2 x 2 latents, which predicts a velocity and its sigma."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = PatchEmbed(SIZE // 8, 2, 4, WIDTH, bias=True)
        self.t_embedder = TimestepEmbedder(WIDTH)
        self.y_embedder = LabelEmbedder(WIDTH)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.x_embedder.num_patches, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(SiTBlock(WIDTH) for _ in range(DEPTH))
        self.final_layer = FinalLayer(WIDTH)

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.x_embedder(x) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        x = self.final_layer(x, c)
        side = SIZE // 16
        x = torch.einsum("nhwpqc->nchpwq", x.reshape(-1, side, side, 2, 2, 8))
        return x.reshape(-1, 8, SIZE // 8, SIZE // 8).chunk(2, dim=1)[0]


@torch.no_grad()
def update_ema(ema_model: nn.Module, model: nn.Module, decay: float = 0.9999) -> None:
    """Step the EMA model towards the current model."""
    ema_params = OrderedDict(ema_model.named_parameters())
    for name, param in OrderedDict(model.named_parameters()).items():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)


def training_loss(model: nn.Module, x1: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The velocity of the straight path from noise to the latents."""
    x0, t = torch.randn_like(x1), torch.rand((x1.shape[0],)).to(x1)
    at = t.view(-1, 1, 1, 1)
    predicted = model(at * x1 + (1 - at) * x0, t, y=y)
    return ((predicted - (x1 - x0)) ** 2).mean(dim=[1, 2, 3]).mean()


def main() -> None:
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = rank % torch.cuda.device_count()
    torch.manual_seed(rank)
    torch.cuda.set_device(device)
    model = SiT()
    ema = deepcopy(model).to(device)
    for param in ema.parameters():
        param.requires_grad = False
    ddp = DistributedDataParallel(model.to(device), device_ids=[device])
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(64, 128, 256, 256),
        layers_per_block=2,
    ).to(device)
    opt = torch.optim.AdamW(ddp.parameters(), lr=1e-4, weight_decay=0)
    pictures = Pictures()
    sampler = DistributedSampler(pictures, num_replicas=dist.get_world_size(), rank=rank, shuffle=True)
    loader = DataLoader(pictures, batch_size=BATCH, sampler=sampler, num_workers=2, pin_memory=True, drop_last=True)
    update_ema(ema, ddp.module, decay=0)
    ddp.train()
    ema.eval()
    running_loss = 0.0
    for step, (x, y) in enumerate(loader, start=1):
        x, y = x.to(device), y.to(device)
        with torch.no_grad():
            x = vae.encode(x).latent_dist.sample().mul_(0.18215)
        loss = training_loss(ddp, x, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_ema(ema, ddp.module)
        running_loss += loss.item()
        if step % LOG_EVERY == 0:
            torch.cuda.synchronize()
            avg_loss = torch.tensor(running_loss / LOG_EVERY, device=device)
            dist.all_reduce(avg_loss, op=dist.ReduceOp.SUM)
            print(f"(step={step:07d}) Train Loss: {avg_loss.item() / dist.get_world_size():.4f}")
            running_loss = 0.0
        if step == STEPS:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
