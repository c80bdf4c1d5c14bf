"""After Ultralytics' quickstart: ``ultralytics_yolo.py``, ``YOLO("yolov8n.yaml").train(...)`` on pictures of noise.

Runs on GPUs too, under torchrun. The configuration and its random weights come with the package; the pictures are
written first.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image
from ultralytics import YOLO

PICTURES, SIZE, BATCH = 128, 320, 2


def written_data() -> Path:
    """A data set as its YAML file: pictures of noise, each with two boxes."""
    root = Path("data").absolute()
    random = np.random.default_rng(0)
    for folder in ("images", "labels"):
        (root / folder / "train").mkdir(parents=True, exist_ok=True)
    for number in range(PICTURES):
        pixels = random.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"images/train/{number:03}.jpg")
        boxes = "\n".join(f"{number % 4} {x} 0.5 0.2 0.3" for x in (0.3, 0.7))
        (root / f"labels/train/{number:03}.txt").write_text(boxes + "\n")
    names = "".join(f"  {number}: thing{number}\n" for number in range(4))
    described = root / "data.yaml"
    described.write_text(f"path: {root}\ntrain: images/train\nval: images/train\nnames:\n{names}")
    return described


def main() -> None:
    data = written_data()
    model = YOLO("yolov8n.yaml")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    model.train(
        data=str(data),
        epochs=2,
        imgsz=SIZE,
        batch=BATCH * world_size,
        device=list(range(world_size)) if world_size > 1 else 0,
        workers=0,
        pretrained=False,
        plots=False,
        val=False,
        amp=False,
        project="runs",
    )


if __name__ == "__main__":
    main()
