"""The program ``nvidia-smi``. It is started by its path, in isolated mode."""

from __future__ import annotations

import sys

sys.path.append(__file__.rsplit("/", 4)[0])
from fakedist.gpu.smi.nvidia_smi import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
