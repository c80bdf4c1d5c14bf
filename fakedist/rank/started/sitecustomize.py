"""Python runs this when a process begins that a script on the virtual GPU started, directly or not.

Before the process imports what would load CUDA, it joins the rank's GPU. Any other process only pays for this file.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing takes longer to import than all of this
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

_HERE = os.path.dirname(__file__)
_ROOT = __file__.rsplit("/", 4)[0]
_LEDGER = os.environ.get("FAKEDIST_LEDGER")  # another rank, which this process may become, has its own
#: Packages that load CUDA's libraries while they are imported.
_LOAD_CUDA = frozenset({"torch", "pynvml", "cupy", "cuda"})


class _BeforeCuda:
    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _LOAD_CUDA:
            return None
        sys.meta_path.remove(cls)
        if os.environ.get("FAKEDIST_LEDGER") != _LEDGER:
            return None
        is_known = _ROOT in sys.path
        if not is_known:
            sys.path.append(_ROOT)
        from fakedist.rank.joining import join

        if not is_known and _ROOT in sys.path:
            sys.path.remove(_ROOT)
        join()
        # Python goes on behind this finder, but the one that waits for torch is in front of it.
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        return next((spec for spec in specs if spec is not None), None)


def _run_the_next() -> None:
    """Run the environment's own sitecustomize, which this one hides, as if it were the first."""
    sys.path[:] = [path for path in sys.path if path != _HERE]
    mine = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", mine)


if _LEDGER and sys.version_info >= (3, 11) and "sitecustomize" in sys.modules:
    sys.meta_path.insert(0, _BeforeCuda)
    _run_the_next()
