"""After DETR's main.py: ``detr_train.py [rt_detr|d_fine]``, Transformers' ports, boxes matched on the host, DDP.

DETR has a ResNet-50. RT-DETR and D-FINE also learn to remove noise from boxes, and check their boxes before each match.

Runs on GPUs too, under torchrun. Weights and pictures are random; pictures of a batch differ in size, so they have a
mask.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import (
    DetrConfig,
    DetrForObjectDetection,
    DFineConfig,
    DFineForObjectDetection,
    PreTrainedModel,
    RTDetrConfig,
    RTDetrForObjectDetection,
)

BATCH, CLASSES, STEPS, MAX_NORM = 2, 91, 6, 0.1
SIZES = ((512, 640), (480, 608))
_Example = tuple[torch.Tensor, dict[str, torch.Tensor]]


class Pictures(Dataset[_Example]):
    """Noise of two sizes, with three boxes each."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> _Example:
        generator = torch.Generator().manual_seed(index)
        boxes = torch.rand(3, 4, generator=generator) * 0.4 + 0.3
        labels = torch.randint(0, CLASSES, (3,), generator=generator)
        return torch.randn(3, *SIZES[index % 2], generator=generator), {"boxes": boxes, "class_labels": labels}


def collate(batch: list[_Example]) -> dict[str, Any]:
    """Pictures in the corner of the largest, and where they are."""
    height, width = SIZES[0]
    pixels, mask = torch.zeros(len(batch), 3, height, width), torch.zeros(len(batch), height, width, dtype=torch.long)
    for number, (picture, _) in enumerate(batch):
        pixels[number, :, : picture.shape[1], : picture.shape[2]] = picture
        mask[number, : picture.shape[1], : picture.shape[2]] = 1
    return {"pixel_values": pixels, "pixel_mask": mask, "labels": [target for _, target in batch]}


def reduce_dict(losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The losses' mean over all ranks."""
    with torch.no_grad():
        names = sorted(losses)
        values = torch.stack([losses[name] for name in names])
        dist.all_reduce(values)
        return dict(zip(names, values / dist.get_world_size(), strict=True))


def make_model(kind: str) -> PreTrainedModel:
    """A model with random weights; a DETR if no kind is named."""
    if kind == "rt_detr":
        return RTDetrForObjectDetection(RTDetrConfig(num_labels=CLASSES))
    if kind == "d_fine":
        return DFineForObjectDetection(DFineConfig(num_labels=CLASSES))
    config = DetrConfig(use_timm_backbone=True, use_pretrained_backbone=False, backbone="resnet50", num_labels=CLASSES)
    config.auxiliary_loss = True
    return DetrForObjectDetection(config)


def main() -> None:
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", init_method="env://")
    dist.barrier()
    torch.manual_seed(42 + dist.get_rank())
    device = torch.device("cuda")
    model = make_model(*sys.argv[1:2] or [""]).to(device)
    ddp = DistributedDataParallel(model, device_ids=[gpu])
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    print("number of params:", sum(p.numel() for _, p in named))
    groups = [
        {"params": [p for name, p in named if "backbone" not in name]},
        {"params": [p for name, p in named if "backbone" in name], "lr": 1e-5},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, weight_decay=1e-4)
    pictures = Pictures()
    batches = BatchSampler(DistributedSampler(pictures), BATCH, drop_last=True)
    loader = DataLoader(pictures, batch_sampler=batches, collate_fn=collate, num_workers=0)
    ddp.train()
    for step, batch in enumerate(loader, start=1):
        labels = [{key: value.to(device) for key, value in target.items()} for target in batch["labels"]]
        outputs = ddp(batch["pixel_values"].to(device), batch["pixel_mask"].to(device), labels=labels)
        reduced = reduce_dict(outputs.loss_dict)
        loss_value = sum(value.item() for value in reduced.values())
        if not torch.isfinite(torch.tensor(loss_value)):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)
        optimizer.zero_grad()
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM)
        optimizer.step()
        print(f"step {step} loss {loss_value:.3f}")
        if step == STEPS:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
