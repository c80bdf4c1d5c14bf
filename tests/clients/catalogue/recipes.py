"""Public projects' recipes, each on sizes of its own and without a download: what users of PyTorch run first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.clients.catalogue.arithmetic import BF16, FP32, Arithmetic, Transformer
from tests.clients.catalogue.entry import Entry, Refusal

#: Parameters, gradients and states agree to a few scalars and the buffers of rotary embeddings.
_EXACT = 1e-4
#: The Llama of TRL's and LitGPT's recipes.
_SMALL = Transformer(4, 1024, 2816, 8192, keys=256)
#: The Llama of LoRA, and what its seven matrices a layer take in and give out.
_LORA = Transformer(4, 2048, 5632, 8192, keys=512)
_IN_AND_OUT = 4 * (2 * (2048 + 2048) + 2 * (2048 + 512) + 3 * (2048 + 5632))


def _trained(elements: int, *, parameters: float | None = None, flops: float | None = None) -> Arithmetic:
    """Gradients and two states of each in fp32; ``parameters`` where there are more than those."""
    held = FP32 * elements
    return Arithmetic(parameters or held, held, 2 * held, flops=flops, bytes_within=_EXACT)


def _nd_parallel(rank: int) -> Arithmetic:
    """A sequence of 1024 over two ranks: each takes an early and a late one of its four quarters, so both do the same.

    Attention computes a half of its own square, and a half of that with the other rank's keys. SGD keeps no state.
    """
    model, tokens = Transformer(4, 2048, 5632, 32_000, keys=1024), 512
    scores = tokens * (tokens + 1) / 2 + tokens * tokens / 2
    flops = 6 * model.matrices * tokens + 14 * scores * model.hidden * model.layers
    return Arithmetic(None, None, 0, flops=flops, phases=("forward", "backward", "optimizer"))


def _dpo(rank: int) -> Arithmetic:
    """A policy and its reference; two pairs of answers to prompts of 64 words, of 192 words and an end.

    The last token enters no layer. The output layer sees answers alone, and the policy's runs again in backward.
    """
    sequences, tokens, answers = 4, 256, 193
    layers = _SMALL.layers * _SMALL.in_a_layer
    head = _SMALL.vocabulary * _SMALL.hidden
    scores = tokens * (tokens + 1) / 2
    each = (6 + 2) * layers * tokens + (8 + 2) * head * answers + (14 + 4) * scores * _SMALL.hidden * _SMALL.layers
    return _trained(_SMALL.parameters, parameters=2 * FP32 * _SMALL.parameters, flops=sequences * each)


def _grpo(rank: int) -> Arithmetic:
    """Without a reference model, which beta 0 leaves out."""
    return _trained(_SMALL.parameters)


def _lora(rank: int) -> Arithmetic:
    """Rank 16 on each of seven matrices a layer, in fp32; the model itself is bf16 and frozen."""
    adapters = 16 * _IN_AND_OUT
    return _trained(adapters, parameters=BF16 * _LORA.parameters + FP32 * adapters)


def _qlora(rank: int) -> Arithmetic:
    """Half a byte for each element of the layers' matrices; embeddings and norms in fp32, adapters in bf16.

    States are a byte an element, an fp32 scale for each 256, and two tables of the 256 numbers that a byte means.
    """
    matrices = _LORA.layers * _LORA.in_a_layer
    adapters = 16 * _IN_AND_OUT
    parameters = matrices / 2 + FP32 * (_LORA.parameters - matrices) + BF16 * adapters
    states = 2 * (adapters + FP32 * adapters / 256 + FP32 * 256)
    phases = ("forward", "recompute", "backward")
    return Arithmetic(parameters, BF16 * adapters, states, bytes_within=_EXACT, phases=phases)


def _litgpt(rank: int) -> Arithmetic:
    """An eighth of what is kept; two micro-batches of two sequences of 512."""
    shard = FP32 * _SMALL.parameters / 8
    return Arithmetic(None, shard, 2 * shard, flops=2 * _SMALL.flops(2, 512), bytes_within=_EXACT)


def _minimind(rank: int) -> Arithmetic:
    """Four micro-batches of eight texts of 340; cosines and sines are buffers."""
    model = Transformer(8, 512, 1408, 6400, keys=128, tied=True)
    held = FP32 * (model.parameters + 2 * 340 * 64)
    return _trained(model.parameters, parameters=held, flops=4 * model.flops(8, 340))


def _picotron(rank: int) -> Arithmetic:
    """Half of each matrix of two layers, and half of the embedding or of the projection behind the last norm; bf16.

    Gradients are fp32 buckets, and a bf16 copy at the end of backward. Four micro-batches of two sequences of 512.
    """
    model = Transformer(2, 1024, 2816, 4096)
    is_last = rank // 2 % 2
    matrices = model.layers * model.in_a_layer // 2
    elements = matrices + 4096 * 1024 + (2 * model.layers + is_last) * 1024
    flops = 6 * (matrices + is_last * 4096 * 1024) * 512 + 14 * (512 * 513 / 2) * model.hidden / 2 * model.layers
    return Arithmetic(
        BF16 * elements, (FP32 + BF16) * elements, 2 * BF16 * elements, flops=8 * flops, bytes_within=_EXACT
    )


def _ppo(rank: int) -> Arithmetic:
    """Nature's convolutions on 64 pictures: a step is a minibatch. The first convolution's input has no gradient."""
    convolutions = ((4, 32, 8, 20), (32, 64, 4, 9), (64, 64, 3, 7))  # channels in and out, kernel, size of the output
    weights = [channels * out * kernel**2 for channels, out, kernel, _ in convolutions]
    products = [weight * size**2 for weight, (*_, size) in zip(weights, convolutions, strict=True)]
    dense = 64 * 7 * 7 * 512 + 512 * 6 + 512
    flops = 64 * (4 * products[0] + 6 * sum(products[1:]) + 6 * dense)
    return _trained(sum(weights) + dense + (32 + 64 + 64) + (512 + 6 + 1), flops=flops)


def _dino(rank: int) -> Arithmetic:
    """ViT-S/16 and DINO's head, twice; the norms of the head's last layer do not train.

    Nor does the loss's centre, a buffer as wide as the head, of which an old and a new one live for a moment.
    """
    vit = Transformer(12, 384, 1536, 0, gated=False, biases=True).parameters + 768 * 384 + 384 + 384 + 197 * 384
    head = (384 * 2048 + 2048) + (2048 * 2048 + 2048) + (2048 * 256 + 256) + 256 * 16_384
    return replace(_trained(vit + head, parameters=FP32 * (2 * (vit + head + 16_384) + 16_384)), bytes_within=0.001)


def _sit(rank: int) -> Arithmetic:
    """SiT-B/2 of four layers: what trains of it. Its positions do not, nor do the VAE and the EMA."""
    h = 768
    block = (4 * h * h + 4 * h) + (8 * h * h + 5 * h) + (6 * h * h + 6 * h)
    ends = (16 * h + h) + (256 * h + h + h * h + h) + 1001 * h + (32 * h + 32) + (2 * h * h + 2 * h)
    held = FP32 * (4 * block + ends)
    return Arithmetic(None, held, 2 * held, bytes_within=_EXACT)


def _unet3d(rank: int) -> Arithmetic:
    """MONAI's UNet: two convolutions of 27 and a residual one a level down, a transposed and a residual one a level up.

    Norms have no parameters, each activation has one. The lowest level keeps its size: its residual is a product.
    """
    down = [(1, 16), (16, 32), (32, 64), (64, 128)]
    up = [(384, 64), (128, 32), (64, 16), (32, 1)]
    elements = sum(27 * (2 * low * high + high * high) + 3 * high + 2 for low, high in down)
    elements += 27 * (128 * 256 + 256 * 256) + 128 * 256 + 3 * 256 + 2
    elements += sum(27 * (wide * narrow + narrow * narrow) + 2 * narrow + 2 for wide, narrow in up) - 1
    return _trained(elements)


def _printed(elements: int, states: int = 2) -> Callable[[int], Arithmetic]:
    """Gradients and states in fp32 of the elements that train, as many as a recipe or its project prints."""
    held = FP32 * elements
    return lambda rank: Arithmetic(None, held, states * held, bytes_within=_EXACT)


def _x_transformers(rank: int) -> Arithmetic:
    """Six layers of 512 with gains in their norms, no biases in attention; bytes are the vocabulary."""
    width = 512
    layer = 2 * width + 4 * width**2 + 8 * width**2 + 5 * width
    return _trained(2 * 256 * width + 6 * layer + width)


def _gin(rank: int) -> Arithmetic:
    """An embedding of atoms and one of bonds, three layers of two products and two norms, and a last product."""
    width = 300
    layer = 4 * width**2 + 3 * width + 6 * width + 1
    elements = (119 + 6) * width + 3 * layer + width + 1
    norms = FP32 * 3 * 2 * (width + 2 * width) + 8 * 3 * 2  # means, variances, and a count of batches
    return _trained(elements, parameters=FP32 * elements + norms)


def _entry(
    framework: str, feature: str, job: str, arithmetic: Callable[[int], Arithmetic] | None, **more: Any
) -> Entry:
    """A job of eight ranks, of which the first and the last run unless ``more`` says otherwise."""
    script, *arguments = job.split()
    settings: dict[str, Any] = {"ranks": (0, 7), "collectives": ("all_reduce", "broadcast"), "attributed": 0.8}
    settings["from_init"] = arithmetic is not None
    return Entry(
        framework,
        feature,
        f"tests/clients/jobs/{script}",
        arguments=tuple(arguments),
        arithmetic=arithmetic,
        **settings | more,
    )


_HUGGING_FACE = {"requires": ("transformers", "accelerate")}
_ND = {
    "package": "accelerate",
    "requires": ("transformers",),
    "collectives": ("all_gather_into_tensor", "reduce_scatter_tensor"),
}

ENTRIES = (
    _entry(
        "Accelerate",
        "nd_parallel: FSDP2 over four, context parallelism over two",
        "accelerate_nd_parallel.py --dp-shard-size 4 --cp-size 2",
        _nd_parallel,
        categories=("parameter", "gradient", "activation"),
        **_ND,
    ),
    _entry(
        "Accelerate",
        "nd_parallel: FSDP2 over four, tensor parallelism over two",
        "accelerate_nd_parallel.py --dp-shard-size 4 --tp-size 2",
        None,
        ranks=(0,),
        refused=Refusal(
            "The parallel mesh requires 2 processes, but world_size is 8",
            "Transformers 5.23 shards a model over all ranks or none, so its own check ends the example on GPUs too",
        ),
        **_ND,
    ),
    _entry(
        "Accelerate",
        "nd_parallel: tensor parallelism alone",
        "accelerate_nd_parallel.py --tp-size 8",
        None,
        ranks=(0,),
        refused=Refusal(
            "got mixed torch.Tensor and DTensor",
            "Transformers leaves the norms plain tensors, and torch's SGD takes no list of both, on GPUs too",
        ),
        **_ND,
    ),
    _entry("TRL", "DPO, a reference model", "trl_preferences.py dpo", _dpo, package="trl", **_HUGGING_FACE),
    _entry(
        "TRL",
        "GRPO, four answers of 64 tokens generated by the model itself",
        "trl_preferences.py grpo",
        _grpo,
        package="trl",
        silent=("experts_made_up",),
        **_HUGGING_FACE,
    ),
    _entry(
        "PEFT",
        "LoRA on all linear layers, TRL's SFT",
        "peft_qlora.py --bits 16 --optim adamw_torch",
        _lora,
        ranks=(0,),
        package="peft",
        requires=("trl", "transformers"),
        attributed=0.55,  # the peak is DDP's broadcast of the whole model, in buckets that belong to no layer
    ),
    _entry(
        "PEFT",
        "QLoRA: 4 bits, nested scales, AdamW of 8 bits in pages",
        "peft_qlora.py",
        _qlora,
        package="peft",
        requires=("bitsandbytes", "trl", "transformers"),
    ),
    _entry(
        "diffusers",
        "UNet of train_unconditional, EMAModel, DDP by Accelerate",
        "diffusers_train.py --model unet",
        None,
        ranks=(0,),
        package="diffusers",
        requires=("accelerate",),
        prints=("copy of the parameters (ema_model)",),
    ),
    _entry(
        "LitGPT",
        "pretrain: FSDP by Fabric, compiled, two micro-batches",
        "litgpt_pretrain.py",
        _litgpt,
        ranks=(0,),
        package="litgpt",
        collectives=("all_gather_into_tensor", "reduce_scatter_tensor"),
    ),
    _entry("minimind", "pretraining, four micro-batches, DDP", "minimind_pretrain.py", _minimind, fast=(7,)),
    _entry("minimind", "the same in fp16, GradScaler", "minimind_pretrain.py --dtype float16", _minimind),
    _entry(
        "picotron",
        "tensor, pipeline and data parallelism of two each, 1F1B, gradients in fp32 buckets",
        "picotron_train.py",
        _picotron,
        ranks=(0, 2),
        collectives=("all_reduce", "send", "recv"),
    ),
    _entry(
        "DINO",
        "ViT-S/16, ten crops, EMA teacher, fp16, norms of gradients read one by one",
        "dino_train.py",
        _dino,
        package="timm",
        fast=(0,),
    ),
    _entry(
        "SiT",
        "SiT-B/2, latents of a VAE, EMA, DDP",
        "sit_train.py",
        _sit,
        package="timm",
        requires=("diffusers",),
        prints=("copy of the parameters (ema)",),
    ),
    _entry(
        "DETR",
        "ResNet-50, Transformers' port, boxes matched on the host, DDP",
        "detr_train.py",
        _printed(41_302_368 + 64 * 3 * 49 + 212_992),  # and what Transformers does not freeze: before the second stage
        package="transformers",
        silent=("experts_made_up",),
        requires=("timm", "scipy"),
    ),
    *(
        _entry(
            name,
            "Transformers' port, queries with noise to remove, boxes checked before each match, DDP",
            f"detr_train.py {kind}",
            arithmetic,
            package="transformers",
            silent=("experts_made_up",),
            requires=("scipy",),
        )
        for name, kind, arithmetic in (
            ("RT-DETR", "rt_detr", _printed(42_913_977)),
            ("D-FINE", "d_fine", _printed(31_266_755)),
        )
    ),
    _entry(
        "Ultralytics",
        "YOLOv8n from its YAML file, its own trainer, DDP",
        "ultralytics_yolo.py",
        _printed(3_011_612),  # of YOLOv8n with four classes
        package="ultralytics",
        silent=("experts_made_up",),
        environment={"YOLO_CONFIG_DIR": "{directory}", "YOLO_OFFLINE": "1"},
    ),
    _entry(
        "SAM 2",
        "fine-tuning of Hiera-B+ by its own configuration, clicks drawn in each step, DDP",
        "sam2_train.py",
        _printed(80_850_178),
        package="sam2",
        requires=("hydra-core", "tensordict"),
    ),
    _entry(
        "x-transformers",
        "train_enwik8: a decoder of bytes, flash attention, text generated in the first iteration",
        "x_transformers_train.py",
        _x_transformers,
        ranks=(0,),
        world_size=1,
        collectives=(),
        package="x-transformers",
    ),
    _entry(
        "PyG",
        "graph classification, GINE of three layers, batches that differ in size, DDP",
        "pyg_graphs.py",
        _gin,
        package="torch-geometric",
    ),
    _entry(
        "MACE",
        "run_train: a potential whose forces are a gradient, amsgrad, EMA, DDP",
        "mace_train.py",
        _printed(848_528, states=3),  # amsgrad; e3nn counts the paths of its irreps
        package="mace-torch",
        requires=("ase", "torch-ema"),
    ),
    _entry("MONAI", "UNet of volumes, Dice loss, MetaTensor, DDP", "monai_unet.py", _unet3d, package="monai"),
    _entry(
        "CleanRL",
        "PPO of Atari's shape, gradients averaged by one all_reduce",
        "cleanrl_ppo.py",
        _ppo,
        collectives=("all_reduce",),
        attributed=0.55,  # the rollout is the script's own
        fast=(7,),
    ),
)
