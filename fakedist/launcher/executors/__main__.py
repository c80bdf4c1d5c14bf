"""The program of a supervisor. It is started by its path and without site-packages, so that it starts in 30 ms."""

from __future__ import annotations

import sys

_ROOT = __file__.rsplit("/", 4)[0]
if sys.flags.safe_path:
    sys.path.insert(0, _ROOT)
else:
    sys.path[0] = _ROOT

from fakedist.launcher.executors.process import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
