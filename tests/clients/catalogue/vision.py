"""Pictures: diffusers, timm and open_clip, each trained as its own script does."""

from __future__ import annotations

from tests.clients.catalogue.arithmetic import FP32, Arithmetic, Transformer
from tests.clients.catalogue.entry import Entry

_OPEN_CLIP = (
    "--dataset-type synthetic --train-num-samples 100000 --model ViT-B-32 --batch-size 16 --workers 0"
    " --precision amp_bf16 --local-loss --gather-with-grad --epochs 1 --warmup 10 --log-every-n-steps 1"
)
_WORLD = {"world_size": 64, "ranks": (0, 31, 63), "collectives": ("all_reduce", "broadcast")}


def _vit(rank: int) -> Arithmetic:
    """ViT-B/16: 12 layers of 768, 196 patches and a class token, 16 pictures; its EMA is a second copy.

    Patches are a matrix of 768 x 768 without a gradient of its input; the head sees the class token alone.
    """
    layers = Transformer(12, 768, 3072, 0, gated=False, biases=True)
    patches, head, tokens = 768 * 768, 768 * 1000, 197
    elements = layers.parameters + patches + 768 + head + 1000 + 768 + tokens * 768
    products = layers.flops(1, tokens, causal=False) + 4 * patches * 196 + 6 * head
    held = FP32 * elements
    return Arithmetic(held, held, 2 * held, flops=16 * products)


def _dit(rank: int) -> Arithmetic:
    """Four layers of DiT-B/2 on 256 patches of 16 latents; modulation sees one vector a picture.

    Patches are a convolution of 16 to 768, whose input has no gradient; each layer has its own embeddings of time
    (256 to 768 to 768) and of class (1001 rows), and makes six vectors of 768 of them. Embeddings of positions and the
    time's 256 sines are not parameters.
    """
    h, tokens = 768, 256
    blocks = 4 * (4 * h * h + 2 * h * 4 * h)
    modulation = 4 * (256 * h + h * h + h * 6 * h)
    biases = 4 * (4 * h + 5 * h + h + h + 6 * h)
    classes = 4 * 1001 * h
    ends = (16 * h + h) + (h * 2 * h + 2 * h) + (h * 16 + 16)
    held = FP32 * (blocks + modulation + biases + classes + ends)
    attention = 14 * tokens * tokens * h * 4
    once = 6 * (modulation + 2 * h * h) - 4 * 2 * 256 * h  # the sines have no gradient
    flops = 16 * (6 * (blocks + 16 * h) * tokens + 4 * 16 * h * tokens + once + attention)
    positions = FP32 * tokens * h
    return Arithmetic(held + positions, held, 2 * held, flops=flops)


def _clip(rank: int) -> Arithmetic:
    """ViT-B/32 of 49 patches and a class token, and 12 layers of 512 on 77 tokens; 16 pairs a rank of 64.

    Logits are 16 x 1024 twice, of features of 512 that have gradients on both sides.
    """
    picture = Transformer(12, 768, 3072, 0, gated=False, biases=True)
    text = Transformer(12, 512, 2048, 49_408, gated=False, biases=True)
    patches, tokens = 3 * 32 * 32 * 768, 50
    elements = picture.parameters + patches + tokens * 768 + 768 + 2 * 768 + 768 * 512
    elements += text.parameters - text.vocabulary * 512 + 77 * 512 + 512 * 512 + 1
    products = picture.flops(1, tokens, causal=False) + 4 * patches * 49 + 6 * 768 * 512
    products += text.flops(1, 77) - 6 * text.vocabulary * 512 * 77 + 6 * 512 * 512
    logits = 2 * 6 * 16 * 1024 * 512
    held = FP32 * elements
    return Arithmetic(held, held, 2 * held, flops=16 * products + logits)


ENTRIES = (
    Entry(
        "diffusers",
        "DiT, EMAModel, DDP by Accelerate",
        "tests/clients/jobs/diffusers_train.py",
        package="diffusers",
        requires=("accelerate",),
        arguments=("--model", "dit"),
        fast=(31,),
        prints=("copy of the parameters (ema_model)",),
        arithmetic=_dit,
        **_WORLD,
    ),
    Entry(
        "timm",
        "ViT-B/16, ModelEmaV3, mixup",
        "tests/clients/jobs/timm_train.py",
        package="timm",
        arguments=("--model-ema",),
        prints=("copy of the parameters (model_ema)",),
        arithmetic=_vit,
        **_WORLD,
    ),
    Entry(
        "open_clip",
        "ViT-B/32, its own training script, features gathered with gradients",
        "-m open_clip_train.main",
        package="open_clip_torch",
        requires=("webdataset",),
        arguments=tuple(_OPEN_CLIP.split()),
        world_size=64,
        ranks=(0, 31, 63),
        taped=True,  # the name of the experiment comes from rank 0
        collectives=("all_reduce", "all_gather"),
        arithmetic=_clip,
    ),
)
