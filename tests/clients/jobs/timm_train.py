"""After timm's train.py: ``timm_train.py --model resnet50 --model-ema``, under torchrun; random pictures."""

from __future__ import annotations

import argparse
import logging
from contextlib import suppress
from functools import partial

import timm
import torch
from timm import utils
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

_logger = logging.getLogger("train")


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Random pictures of 1000 classes."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3, 224, 224, generator=torch.Generator().manual_seed(index)), index % 1000


def parse_args() -> argparse.Namespace:
    """As train.py's, the few that matter here."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("-b", "--batch-size", type=int, default=16)
    parser.add_argument("--opt", default="adamw")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--model-ema", action="store_true")
    parser.add_argument("--sync-bn", action="store_true")
    parser.add_argument("--amp-dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--grad-checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    args.local_rank, args.device_modules = 0, None
    return args


def main() -> None:
    utils.setup_default_logging()
    args = parse_args()
    device = utils.init_distributed_device(args)
    _logger.info(f"Training in distributed mode. Process {args.rank}, total {args.world_size}, device {args.device}.")
    utils.random_seed(42, args.rank)
    model = timm.create_model(args.model, pretrained=False, num_classes=1000, drop_path_rate=0.1)
    if args.grad_checkpointing:
        model.set_grad_checkpointing(enable=True)
    model.to(device=device, memory_format=torch.channels_last if args.channels_last else torch.contiguous_format)
    if args.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = create_optimizer_v2(model, opt=args.opt, lr=args.lr, weight_decay=0.05)
    amp_dtype = getattr(torch, args.amp_dtype)
    amp_autocast = partial(torch.autocast, device_type=device.type, dtype=amp_dtype)
    loss_scaler = utils.NativeScaler() if amp_dtype is torch.float16 else None
    model_ema = utils.ModelEmaV3(model, decay=0.9998, use_warmup=True) if args.model_ema else None
    model = DistributedDataParallel(model, device_ids=[device], broadcast_buffers=True)
    pictures = Pictures()
    loader = DataLoader(pictures, batch_size=args.batch_size, sampler=DistributedSampler(pictures), drop_last=True)
    schedule, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=300, updates_per_epoch=len(loader))
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=1000)
    train_loss_fn = SoftTargetCrossEntropy().to(device=device)
    losses = utils.AverageMeter()
    model.train()
    for update, (host_input, host_target) in enumerate(loader):
        pictures_in, target = mixup(host_input.to(device), host_target.to(device))
        if args.channels_last:
            pictures_in = pictures_in.contiguous(memory_format=torch.channels_last)
        with amp_autocast():
            loss = train_loss_fn(model(pictures_in), target)
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, clip_grad=args.clip_grad, parameters=model.parameters())
        else:
            loss.backward()
            utils.dispatch_clip_grad(model.parameters(), value=args.clip_grad, mode="norm")
            optimizer.step()
        optimizer.zero_grad()
        if model_ema is not None:
            model_ema.update(model, step=update)
        with suppress(ZeroDivisionError):
            losses.update(utils.reduce_tensor(loss.detach(), args.world_size).item(), pictures_in.size(0))
        if utils.is_primary(args):
            _logger.info(f"Train: [{update}] Loss: {losses.val:.3g} ({losses.avg:.3g})")
        schedule.step_update(num_updates=update, metric=losses.avg)
        if update + 1 == args.steps:
            break
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
