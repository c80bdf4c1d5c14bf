"""The program of a rank's process, or of a fork server of ranks.

Its arguments are a run directory, or the server's file of imports and its door's descriptor.

It is started by its path, so it imports its parent's fakedist even from a bare clone, and no module next to the script
can shadow one of ours. Afterwards the directory that contains fakedist is searched last.
"""

from __future__ import annotations

import signal
import sys

_INTERRUPT = signal.getsignal(signal.SIGINT)
if _INTERRUPT is signal.default_int_handler:  # until main reports it, Ctrl-C just ends this process
    signal.signal(signal.SIGINT, signal.SIG_DFL)
_ROOT = __file__.rsplit("/", 3)[0]
if not sys.flags.safe_path:
    del sys.path[0]
_is_known = _ROOT in sys.path
if not _is_known:
    sys.path.insert(0, _ROOT)

from fakedist.rank.main import main  # noqa: E402
from fakedist.rank.preloading import forked_rank  # noqa: E402

if not _is_known:
    sys.path.append(sys.path.pop(0))
if _INTERRUPT is signal.default_int_handler:
    signal.signal(signal.SIGINT, _INTERRUPT)

# main is called on one line: memory's stacks show where a process began.
if __name__ == "__main__":
    _arguments = (sys.argv[1], None) if len(sys.argv) == 2 else forked_rank(*sys.argv[1:])
    sys.exit(main(*_arguments))
