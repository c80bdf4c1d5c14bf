"""After MONAI's tutorial of distributed training with a UNet: ``monai_unet.py``, volumes of noise as ``MetaTensor``.

Runs on GPUs too, under torchrun.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from monai.data import DataLoader, Dataset
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import Compose, EnsureTyped, MapTransform, RandFlipd, ScaleIntensityd
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

EPOCHS, BATCH, VOLUMES, SIZE = 2, 2, 56, 64


class LoadNoised(MapTransform):
    """A volume and its mask, from their number."""

    def __call__(self, data: dict[str, int]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(data["img"])
        image = torch.randn(1, SIZE, SIZE, SIZE, generator=generator)
        return {"img": image, "seg": (image > 1).float()}


def main() -> None:
    """Train for two epochs; the last batch of each is a half one."""
    dist.init_process_group(backend="nccl", init_method="env://")
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}")
    torch.cuda.set_device(device)
    keys = ["img", "seg"]
    transforms = Compose(
        [
            LoadNoised(keys=keys),
            EnsureTyped(keys=keys),
            ScaleIntensityd(keys="img"),
            RandFlipd(keys=keys, prob=0.5, spatial_axis=0),
        ]
    )
    volumes = Dataset(data=[{"img": number, "seg": number} for number in range(VOLUMES)], transform=transforms)
    sampler = DistributedSampler(volumes)
    loader = DataLoader(volumes, batch_size=BATCH, shuffle=False, num_workers=0, pin_memory=True, sampler=sampler)
    model = UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=1,
        channels=(16, 32, 64, 128, 256),
        strides=(2, 2, 2, 2),
        num_res_units=2,
    ).to(device)
    loss_function = DiceLoss(sigmoid=True).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    ddp = DistributedDataParallel(model, device_ids=[device])
    for epoch in range(EPOCHS):
        ddp.train()
        epoch_loss, step = 0.0, 0
        sampler.set_epoch(epoch)
        for batch_data in loader:
            step += 1
            inputs, labels = batch_data["img"].to(device), batch_data["seg"].to(device)
            optimizer.zero_grad()
            loss = loss_function(ddp(inputs), labels)
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item()
        print(f"epoch {epoch + 1} average loss: {epoch_loss / step:.4f}, {step} steps")
    if dist.get_rank() == 0:
        torch.save(ddp.state_dict(), "final_model.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
