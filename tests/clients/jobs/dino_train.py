"""After DINO's main_dino.py: ``dino_train.py``, a student on ten crops, a teacher on two, its EMA; ViT-S/16, fp16.

Runs on GPUs too, under torchrun. The backbone is timm's; crops are random.
"""

from __future__ import annotations

import math
import os
import sys
from functools import partial

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

OUT, BATCH, LOCAL_CROPS, STEPS, CLIP, MOMENTUM = 16_384, 8, 8, 6, 3.0, 0.996


class Crops(Dataset[tuple[list[torch.Tensor], int]]):
    """Two crops of 224 pixels and eight of 96."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[list[torch.Tensor], int]:
        generator = torch.Generator().manual_seed(index)
        sizes = [224] * 2 + [96] * LOCAL_CROPS
        return [torch.randn(3, size, size, generator=generator) for size in sizes], 0


class DINOHead(nn.Module):
    """Three layers, a normalized bottleneck, and a last layer whose norms stay 1."""

    def __init__(self, in_dim: int, hidden: int = 2048, bottleneck: int = 256) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(in_dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        self.last_layer = nn.utils.weight_norm(nn.Linear(bottleneck, OUT, bias=False))
        self.last_layer.weight_g.data.fill_(1)
        self.last_layer.weight_g.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last_layer(F.normalize(self.mlp(x), dim=-1, p=2))


class MultiCropWrapper(nn.Module):
    """One forward of the backbone for crops of one size, and one of the head for all."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: list[torch.Tensor]) -> torch.Tensor:
        sizes = torch.tensor([crop.shape[-1] for crop in x])
        ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
        start, outputs = 0, []
        for end in ends.tolist():
            outputs.append(self.backbone(torch.cat(x[start:end])))
            start = end
        return self.head(torch.cat(outputs))


class DINOLoss(nn.Module):
    """Cross entropy between what student and teacher say of different crops, the teacher's centred."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, OUT))

    def forward(self, student_output: torch.Tensor, teacher_output: torch.Tensor) -> torch.Tensor:
        student_out = (student_output / 0.1).chunk(2 + LOCAL_CROPS)
        teacher_out = F.softmax((teacher_output - self.center) / 0.04, dim=-1).detach().chunk(2)
        losses = [
            torch.sum(-q * F.log_softmax(view, dim=-1), dim=-1).mean()
            for number, q in enumerate(teacher_out)
            for other, view in enumerate(student_out)
            if other != number
        ]
        self.update_center(teacher_output)
        return sum(losses, torch.zeros((), device=student_output.device)) / len(losses)

    @torch.no_grad()
    def update_center(self, teacher_output: torch.Tensor) -> None:
        """Follow the mean of the teacher's outputs over all ranks."""
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True)
        dist.all_reduce(batch_center)
        batch_center = batch_center / (len(teacher_output) * dist.get_world_size())
        self.center = self.center * 0.9 + batch_center * 0.1


def clip_gradients(model: nn.Module, clip: float) -> list[float]:
    """Clip each parameter's gradient by its own norm, which is read."""
    norms = []
    for _, p in model.named_parameters():
        if p.grad is not None:
            param_norm = p.grad.data.norm(2)
            norms.append(param_norm.item())
            clip_coef = clip / (param_norm + 1e-6)
            if clip_coef < 1:
                p.grad.data.mul_(clip_coef)
    return norms


def main() -> None:
    dist.init_process_group("nccl", init_method="env://")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.barrier()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    vit = partial(timm.create_model, "vit_small_patch16_224", num_classes=0, dynamic_img_size=True)
    student = MultiCropWrapper(vit(drop_path_rate=0.1), DINOHead(384)).cuda()
    teacher = MultiCropWrapper(vit(), DINOHead(384)).cuda()
    student = DistributedDataParallel(student, device_ids=[gpu])
    teacher.load_state_dict(student.module.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    dino_loss = DINOLoss().cuda()
    regularized = [p for p in student.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in student.parameters() if p.requires_grad and p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": regularized}, {"params": others, "weight_decay": 0.0}], lr=5e-4)
    fp16_scaler = torch.amp.GradScaler("cuda")
    crops = Crops()
    sampler = DistributedSampler(crops, shuffle=True)
    loader = DataLoader(crops, sampler=sampler, batch_size=BATCH, num_workers=0, pin_memory=True, drop_last=True)
    for step, (images, _) in enumerate(loader, start=1):
        for param_group in optimizer.param_groups:
            param_group["lr"] = 5e-4 * step / STEPS
        images = [im.cuda(non_blocking=True) for im in images]
        with torch.autocast("cuda", dtype=torch.float16):
            teacher_output = teacher(images[:2])
            loss = dino_loss(student(images), teacher_output)
        if not math.isfinite(loss.item()):
            print(f"Loss is {loss.item()}, stopping training", flush=True)
            sys.exit(1)
        optimizer.zero_grad()
        fp16_scaler.scale(loss).backward()
        fp16_scaler.unscale_(optimizer)
        clip_gradients(student, CLIP)
        fp16_scaler.step(optimizer)
        fp16_scaler.update()
        with torch.no_grad():
            for param_q, param_k in zip(student.module.parameters(), teacher.parameters(), strict=True):
                param_k.data.mul_(MOMENTUM).add_((1 - MOMENTUM) * param_q.detach().data)
        torch.cuda.synchronize()
        print(f"step {step} loss {loss.item():.3f}")
        if step == STEPS:
            break


if __name__ == "__main__":
    main()
