"""Projects that people train with, by their own commands and configurations, on a Llama that they load from a file.

Each has an environment of its own (``make .venv-NAME``), for it pins other versions than the catalogue's. A project
without a package is a checkout of its repository.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.clients.catalogue.arithmetic import BF16, FP32, Arithmetic
from tests.clients.catalogue.entry import Entry
from tests.clients.catalogue.prepared import LLAMA, write_conversations, write_llama
from tests.conftest import ROOT

_EXACT = 1e-4
_SHARDED = ("all_gather_into_tensor", "reduce_scatter_tensor")


def _prepared(**files: str) -> Callable[[Path], None]:
    """Prepare a Llama, conversations, and files by their name, in which two underscores stand for the dot."""

    def prepare(directory: Path) -> None:
        write_llama(directory)
        write_conversations(directory)
        for name, text in files.items():
            (directory / name.replace("__", ".")).write_text(text)

    return prepare


def _robot(directory: Path) -> None:
    """Prepare a data set of a robot, which LeRobot itself writes."""
    job = ROOT / "tests/clients/jobs/prepared_robot.py"
    subprocess.run([sys.executable, str(job), str(directory)], check=True, capture_output=True)


def _full(rank: int) -> Arithmetic:
    """Everything in fp32; two micro-batches of two texts of 512, computed again in backward."""
    held = FP32 * LLAMA.parameters
    phases = ("forward", "recompute", "backward", "optimizer")
    return Arithmetic(held, held, 2 * held, bytes_within=_EXACT, phases=phases)


def _wan(rank: int) -> Arithmetic:
    """Everything in bf16, on every rank: four layers of 1,536, texts of 4,096, a patch of 2 x 2 pixels.

    Cosines and sines of 1,024 positions are buffers.
    """
    h, ffn = 1536, 8960
    layer = 2 * (4 * h * h + 4 * h + 2 * h) + (2 * h * ffn + ffn + h) + 2 * h + 6 * h
    ends = (16 * 4 * h + h) + (256 * h + h + h * h + h) + (6 * h * h + 6 * h) + (4096 * h + h + h * h + h)
    ends += (h * 64 + 64) + 2 * h
    held = BF16 * (4 * layer + ends)
    return Arithmetic(held + BF16 * 2 * 1024 * 128, held, 2 * held, bytes_within=_EXACT)


def _resnet(rank: int) -> Arithmetic:
    """ResNet-50's published 25,557,032 parameters, and momentum."""
    held = FP32 * 25_557_032
    return Arithmetic(None, held, held, bytes_within=_EXACT)


def _vjepa(rank: int) -> Arithmetic:
    """ViT-L and its predictor, in fp32, and the encoder's moving average, which is not trained."""

    def blocks(number: int, width: int) -> int:
        return number * (12 * width * width + 13 * width) + 2 * width

    encoder = blocks(24, 1024) + 3 * 2 * 16 * 16 * 1024 + 1024
    predictor = blocks(12, 384) + (1024 * 384 + 384) + 2 * 384 + (384 * 1024 + 1024)
    held = FP32 * (encoder + predictor)
    return Arithmetic(held + FP32 * encoder, held, 2 * held, bytes_within=_EXACT)


def _videos(directory: Path) -> None:
    """Prepare the published configuration of ViT-L with one set of clips, each of one picture sixteen times."""
    import yaml
    from PIL import Image  # both come with the frameworks

    Image.new("RGB", (300, 300), (200, 100, 50)).save(directory / "one.jpg")
    (directory / "clips.csv").write_text(f"{directory / 'one.jpg'} 0\n" * 2000)
    checkout = next(entry.root for entry in ENTRIES if entry.framework == "V-JEPA 2")
    config = yaml.safe_load((checkout / "configs/train/vitl16/pretrain-256px-16f.yaml").read_text())
    config["folder"], config["meta"]["load_checkpoint"] = "saved", False
    config["data"] |= {"datasets": ["clips.csv"], "datasets_weights": [1.0], "dataset_fpcs": [16]}
    config["data"] |= {"num_workers": 0, "persistent_workers": False}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))


def _mask_rcnn(rank: int) -> Arithmetic:
    """A ResNet-50 with pyramid, proposals and heads of 80 classes; frozen are its stem, first stage and norms.

    These norms' 106,306 values are buffers. With momentum.
    """
    trained = FP32 * (44_343_216 - 222_400)
    return Arithmetic(FP32 * (44_343_216 + 106_306), trained, trained, bytes_within=_EXACT)


def _coco(directory: Path) -> None:
    """Prepare a set like COCO's: one picture 400 times, with four boxes of three of the 80 classes."""
    from PIL import Image  # Pillow comes with the frameworks

    checkout = next(entry.root for entry in ENTRIES if entry.framework == "Detectron2")
    classes = runpy.run_path(str(checkout / "detectron2/data/datasets/builtin_meta.py"))["COCO_CATEGORIES"]
    (directory / "configs").symlink_to((checkout / "configs").resolve())
    for place in ("annotations", "train2017"):
        (directory / "coco" / place).mkdir(parents=True)
    Image.new("RGB", (640, 480), (200, 100, 50)).save(directory / "coco/train2017/one.jpg")
    images = [{"id": number, "file_name": "one.jpg", "height": 480, "width": 640} for number in range(400)]
    boxes = [
        {"id": 4 * image + box + 1, "image_id": image, "category_id": 1 + box % 3, "iscrowd": 0, "area": 8000}
        | {"bbox": [x, y, 100, 80], "segmentation": [[x, y, x + 100, y, x + 100, y + 80, x, y + 80]]}
        for image in range(len(images))
        for box, (x, y) in enumerate(((40, 60), (160, 100), (280, 140), (400, 180)))
    ]
    known = {"images": images, "annotations": boxes, "categories": [one for one in classes if one["isthing"]]}
    (directory / "coco/annotations/instances_train2017.json").write_text(json.dumps(known))


def _megatron(rank: int) -> Arithmetic:
    """Half of four layers of 2,048 with an embedding, or with a norm and an output: bf16, gradients in fp32.

    Autograd's own gradient of the largest weight is in bf16, and is added to those.
    """
    h, ffn, kv, largest = 2048, 5632, 2 * 4 * 128, 32_000 * 2048 // 2
    layer = (h * (h + kv) + h * h + 3 * h * ffn) // 2 + 2 * h
    held = 4 * layer + largest + (h if rank else 0)
    return Arithmetic(BF16 * held, FP32 * held + BF16 * largest, phases=("forward", "backward", "optimizer"))


def _pictures(directory: Path) -> None:
    """Prepare 1,024 times one picture, in two classes."""
    from PIL import Image  # Pillow comes with the frameworks

    one = directory / "one.jpg"
    Image.new("RGB", (256, 256), (200, 100, 50)).save(one)
    for place in (directory / "pictures" / split / kind for split in ("train", "val") for kind in ("cat", "dog")):
        place.mkdir(parents=True)
        for number in range(512):
            (place / f"{number}.jpg").hardlink_to(one)


def _texts_and_tokenizer(directory: Path) -> None:
    """Prepare nanochat's shards of text, of made-up words, and the tokenizer that it trains of them."""
    shards = directory / "base_data_climbmix"
    shards.mkdir()
    drawn = np.random.default_rng(0)
    words = ["".join(letters) for letters in drawn.choice(list("abcdefghijklmnopqrstuvwxyz"), (20_000, 6))]
    for number in range(2):
        texts = [" ".join(drawn.choice(words, 400)) for _ in range(2000)]
        table = pa.table({"text": texts})
        pq.write_table(table, shards / f"shard_{number:05d}.parquet", row_group_size=125)
    checkout = next(entry.root for entry in ENTRIES if entry.framework == "nanochat")
    command = [sys.executable, "-m", "scripts.tok_train", "--max-chars=3000000"]
    own = os.environ | {"NANOCHAT_BASE_DIR": str(directory), "PYTHONPATH": str(checkout)}
    subprocess.run(command, check=True, capture_output=True, env=own, cwd=checkout)


def _tokens(directory: Path) -> None:
    """Prepare tokens as OLMo-core's example reads them: two bytes each."""
    drawn = np.random.default_rng(0).integers(0, 50_257, 8 << 20).astype(np.uint16)
    drawn.tofile(directory / "c4-train.00000-00099.npy")
    drawn[: 1 << 16].tofile(directory / "c4-validation.00000-00008.npy")


_LLAMA_FACTORY = """model_name_or_path: model
stage: sft
do_train: true
finetuning_type: full
dataset_dir: .
dataset: words
template: default
cutoff_len: 512
preprocessing_num_workers: 1
dataloader_num_workers: 0
output_dir: saved
logging_steps: 1
save_strategy: "no"
report_to: none
include_num_input_tokens_seen: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
max_steps: 6
bf16: true
"""
_AXOLOTL = """base_model: model
bf16: true
datasets:
  - path: messages.jsonl
    type: chat_template
    ds_type: json
    field_messages: messages
chat_template: tokenizer_default
dataset_prepared_path: prepared
dataset_num_proc: 1
val_set_size: 0
output_dir: saved
sequence_len: 1024
pad_to_sequence_len: true
attn_implementation: sdpa
adapter: lora
lora_r: 16
lora_alpha: 32
lora_dropout: 0.0
lora_target_linear: true
gradient_accumulation_steps: 2
micro_batch_size: 2
max_steps: 6
optimizer: adamw_torch_fused
learning_rate: 0.0002
gradient_checkpointing: true
logging_steps: 1
save_strategy: "no"
"""


def _entry(framework: str, feature: str, command: str, arithmetic: Any = None, **more: Any) -> Entry:
    """A job of eight ranks, of which the first and the last run unless ``more`` says otherwise."""
    script, *arguments = shlex.split(command.removeprefix("-m "))
    script = f"-m {script}" if command.startswith("-m ") else script
    settings: dict[str, Any] = {"ranks": (0, 7), "collectives": ("all_reduce",), "minutes": 10, "together": True}
    return Entry(framework, feature, script, arguments=tuple(arguments), arithmetic=arithmetic, **settings | more)


ENTRIES = (
    _entry(
        "LLaMA-Factory",
        "full SFT by its launcher and a YAML file, two micro-batches, gradients checkpointed, DDP",
        "-m llamafactory.launcher sft.yaml",
        _full,
        package="llamafactory",
        requires=("transformers", "trl"),
        prepare=_prepared(
            sft__yaml=_LLAMA_FACTORY, dataset_info__json=json.dumps({"words": {"file_name": "alpaca.json"}})
        ),
    ),
    _entry(
        "ms-swift",
        "swift sft: LoRA on all linear layers, two micro-batches, DDP",
        "-m swift.cli.sft --model model --model_type llama --template default --dataset messages.jsonl "
        "--tuner_type lora --lora_rank 16 --target_modules all-linear --torch_dtype bfloat16 --max_length 1024 "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_steps 6 --logging_steps 1 "
        "--attn_impl sdpa --report_to none --dataloader_num_workers 0 --output_dir saved",
        None,
        package="ms-swift",
        requires=("transformers", "peft"),
        prepare=_prepared(),
    ),
    _entry(
        "axolotl",
        "axolotl train: LoRA on all linear layers, padded conversations, two micro-batches, DDP",
        "-m axolotl.cli.train sft.yaml",
        None,
        package="axolotl",
        requires=("transformers", "trl", "peft"),
        prepare=_prepared(sft__yaml=_AXOLOTL),
        environment={"AXOLOTL_DO_NOT_TRACK": "1"},
    ),
    _entry(
        "Unsloth",
        "FastLanguageModel, LoRA by its kernels, activations checkpointed, TRL's SFT, DDP",
        "tests/clients/jobs/unsloth_sft.py",
        None,
        package="unsloth",
        requires=("transformers", "trl"),
        prepare=_prepared(),
        environment={"UNSLOTH_SKIP_TORCHVISION_CHECK": "1"},
    ),
    _entry(
        "LeRobot",
        "lerobot-train: ACT, a camera and six joints, DDP by Accelerate",
        "-m lerobot.scripts.lerobot_train --policy.type=act --policy.push_to_hub=false "
        "--policy.pretrained_backbone_weights=null --policy.device=cuda --dataset.repo_id=made/robot "
        "--dataset.root=robot --batch_size=8 --steps=6 --log_freq=1 --num_workers=0 --save_checkpoint=false "
        "--wandb.enable=false --output_dir=trained",
        None,
        package="lerobot",
        prepare=_robot,
    ),
    _entry(
        "diffusers",
        "Wan 2.1's transformer, heads and sequence split over four ranks by Ulysses",
        "tests/clients/jobs/wan_train.py",
        _wan,
        package="diffusers",
        world_size=4,
        ranks=(0, 3),
        collectives=("all_to_all", "all_reduce"),
    ),
    _entry(
        "Megatron-core 0.19",
        "Mixtral 8x7B on its own layers: PP 4, EP 8, interleaved 1F1B of 8 stages a rank",
        "examples/megatron_gpt.py --preset mixtral-8x7b --transformer-impl local --exit-interval 2",
        package="megatron-core",
        exactly={"megatron-core": "0.19.2"},
        options=("--gpu", "h200", "--gpu-memory", "unlimited"),
        world_size=64,
        ranks=(0, 48),
        collectives=("all_to_all", "reduce_scatter", "all_gather"),
    ),
    _entry(
        "Megatron-LM",
        "its main's pretrain_gpt.py: TP 2, PP 2, distributed optimizer, reductions and gathers overlapped",
        "pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 1 "
        "--global-batch-size 64 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--disable-bias-linear --train-iters 8 --eval-interval 500 --eval-iters 0 --transformer-impl local --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 32000 --split 99,1,0 --num-workers 0 "
        "--untie-embeddings-and-output-weights --position-embedding-type rope --no-rope-fusion --normalization RMSNorm "
        "--swiglu --num-layers 8 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 "
        "--group-query-attention --num-query-groups 4 --seq-length 2048 --max-position-embeddings 2048 "
        "--attention-dropout 0.0 --hidden-dropout 0.0 --lr 1e-4 --bf16 --no-persist-layer-norm "
        "--no-gradient-accumulation-fusion --no-masked-softmax-fusion",
        _megatron,
        package="pybind11",
        checkout="NVIDIA/Megatron-LM@d98e8a64d",
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        world_size=64,
        ranks=(0, 63),
        collectives=("reduce_scatter", "all_gather"),
    ),
    _entry(
        "timm",
        "its own train.py: ResNet-50, 32 pictures a rank, DDP",
        "train.py --data-dir pictures --model resnet50 --batch-size 32 --epochs 1 --log-interval 1 --workers 1 "
        "--amp --amp-dtype bfloat16 --warmup-epochs 0 --val-split train",
        _resnet,
        package="timm",
        checkout="huggingface/pytorch-image-models@aa4b585",
        prepare=_pictures,
    ),
    _entry(
        "nanochat",
        "base_train, depth 4, two micro-batches, Muon and AdamW in one sharded optimizer, compiled",
        "-m scripts.base_train --depth=4 --device-batch-size=16 --num-iterations=8 --eval-every=-1 "
        "--core-metric-every=-1 --sample-every=-1 --window-pattern=L --total-batch-size=524288",
        package="rustbpe",
        requires=("tiktoken",),
        checkout="karpathy/nanochat@92d63d4",
        prepare=_texts_and_tokenizer,
        environment={"NANOCHAT_BASE_DIR": "{directory}"},
        collectives=("all_reduce", "reduce_scatter", "all_gather"),
    ),
    _entry(
        "V-JEPA 2",
        "pretrain-256px-16f as published for ViT-L, which starts its ranks itself",
        "-m app.main --fname config.yaml",
        _vjepa,
        package="decord",
        checkout="facebookresearch/vjepa2@c2963a474",
        prepare=_videos,
        collectives=("all_reduce",),
    ),
    _entry(
        "Detectron2",
        "train_net.py, Mask R-CNN of a ResNet-50 with pyramid, 1x schedule, which starts its ranks itself",
        "tools/train_net.py --num-gpus 8 --config-file configs/COCO-InstanceSegmentation/"
        "mask_rcnn_R_50_FPN_1x.yaml MODEL.WEIGHTS '' DATALOADER.NUM_WORKERS 0 DATASETS.TEST () OUTPUT_DIR saved",
        _mask_rcnn,
        package="fvcore",
        requires=("pycocotools",),
        checkout="facebookresearch/detectron2@02b5c4e29",
        prepare=_coco,
        environment={"DETECTRON2_DATASETS": "{directory}"},
        collectives=("all_reduce",),
    ),
    _entry(
        "OLMo-core",
        "its example train.py: Llama of 271 M parameters, FSDP2, two micro-batches",
        "src/examples/llm/train.py run --save-folder=saved --work-dir=work --train_module.compile_model=false "
        "--trainer.callbacks.lm_evaluator.enabled=false --trainer.callbacks.downstream_evaluator.enabled=false "
        "--data_loader.num_workers=0 --trainer.no_checkpoints=true --trainer.max_duration.value=6 "
        "--trainer.max_duration.unit=steps",
        package="ai2-olmo-core",
        checkout="allenai/OLMo-core@fa6c5014c",
        prepare=_tokens,
        environment={"OLMO_DATA_ROOT": "{directory}"},
        collectives=_SHARDED,
    ),
)
