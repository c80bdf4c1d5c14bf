"""torch's ``Join``: ranks without inputs left make the calls of those that have some.

This rank cannot know how many inputs the others have, so it takes them to have none left when it has none. The ledger
has which calls the others would make with it, and which is the last one: ``fakedist match`` plays them so.
"""

from __future__ import annotations

import os
import sys
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from fakedist.frames import OURS, TORCH
from fakedist.world.process_group import RankGroup

if TYPE_CHECKING:
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

#: What is between a call of a group and the code that makes it.
_BETWEEN = (
    OURS,
    TORCH + "distributed/distributed_c10d.py",
    TORCH + "distributed/c10d_logger.py",
    TORCH + "utils/_contextlib.py",
)


def joined_with_others(module: ModuleType) -> dict[str, object]:
    """For ``torch.distributed.algorithms.join``: its calls say that they are of a ``Join``."""
    enter, leave, count = module.Join.__enter__, module.Join.__exit__, module.Join._get_num_nonjoined_procs

    def entered(self: Join) -> object:
        if self._enable and isinstance(self._process_group, RankGroup):
            self._process_group.join = lambda: "inside" if _is_made_for_all(sys._getframe(1)) else ""
        return enter(self)

    def count_others(self: Join) -> int:
        if isinstance(self._process_group, RankGroup):
            self._process_group.join = lambda: "joined"
        try:
            return int(count(self))
        finally:
            _leave(self)

    def left(self: Join, *error: object) -> object:
        if error[0] is not None:
            _leave(self)
        return leave(self, *error)

    return {"Join.__enter__": entered, "Join._get_num_nonjoined_procs": count_others, "Join.__exit__": left}


def last_rank_in_common(module: ModuleType) -> dict[str, object]:
    """For ``torch.nn.parallel.distributed``: ranks agree on the last of those that have inputs, which all have."""
    original = module.DistributedDataParallel._find_common_rank

    def find_common_rank(self: DistributedDataParallel, input_rank: int, rank_cond: bool) -> int:
        found = int(original(self, input_rank, rank_cond))
        return self.process_group.size() - 1 if isinstance(self.process_group, RankGroup) else found

    return {"DistributedDataParallel._find_common_rank": find_common_rank}


def _leave(context: Join) -> None:
    if isinstance(context._process_group, RankGroup):
        context._process_group.join = None


def _is_made_for_all(frame: FrameType | None) -> bool:
    """Whether torch's hooks make a call: not the script, nor a module such as SyncBatchNorm, nor without any frame."""
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    if frame is None:  # DDP's reducer, in autograd's thread
        return True
    made_at = frame.f_code.co_filename
    return made_at.startswith(TORCH) and not made_at.startswith(TORCH + "nn" + os.sep + "modules")
