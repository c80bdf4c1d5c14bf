"""The program of a rank's process, whether it starts on its own or is the template that ranks fork from."""

from __future__ import annotations

# With this the child imports the same fakedist as the parent, even from a bare clone. No module next to the script can
# shadow one of ours, and afterwards the directory that contains fakedist is searched last. main is called on the last
# line in each program: memory's stacks show where a process began.
_BOOT = """
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
known = sys.argv[1] in sys.path
if not known:
    sys.path.insert(0, sys.argv[1])
from fakedist.rank.main import main
if not known:
    sys.path.append(sys.path.pop(0))
"""
#: Its arguments: the directory that contains fakedist, and the run directory.
OF_A_RANK = f"{_BOOT}sys.exit(main(sys.argv[2]))\n"
#: Its arguments: the directory that contains fakedist, and those of ``forked_rank``.
OF_A_TEMPLATE = (
    f"{_BOOT}from fakedist.rank.template.serving import forked_rank; sys.exit(main(*forked_rank(*sys.argv[2:])))\n"
)
