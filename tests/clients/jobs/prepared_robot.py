"""Write a data set of a robot in LeRobot's format: four episodes of 50 frames with a camera, an arm of 6 joints.

``python prepared_robot.py DIRECTORY`` makes ``robot/`` in it. Pictures and joints are random.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from lerobot.datasets import LeRobotDataset

FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (6,), "names": None},
    "observation.images.top": {"dtype": "image", "shape": (96, 96, 3), "names": ["height", "width", "channels"]},
    "action": {"dtype": "float32", "shape": (6,), "names": None},
}


def main() -> None:
    """Write the episodes."""
    drawn = np.random.default_rng(0)
    where = Path(sys.argv[1]) / "robot"
    made = LeRobotDataset.create("made/robot", fps=10, features=FEATURES, root=where, use_videos=False)
    for _ in range(4):
        for _ in range(50):
            frame = {name: drawn.random(6, dtype=np.float32) for name in ("observation.state", "action")}
            frame["observation.images.top"] = drawn.integers(0, 256, (96, 96, 3), dtype=np.uint8)
            made.add_frame(frame | {"task": "reach"})
        made.save_episode()
    made.finalize()


if __name__ == "__main__":
    main()
