"""torch's ``Join``: ranks without inputs left make the calls of those that have some.

How many inputs the others have, this rank cannot know, so it has none left when they have none. ``fakedist match`` knows
of the call in which a rank finds that out, and lets it take part in what the others still call.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from fakedist.world.process_group import RankGroup

if TYPE_CHECKING:
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel


def joined_with_others(module: ModuleType) -> dict[str, object]:
    """For ``torch.distributed.algorithms.join``: the call by which a rank learns that no other has inputs left."""
    original = module.Join._get_num_nonjoined_procs

    def count_others(self: Join) -> int:
        group = self._process_group
        if isinstance(group, RankGroup):
            group.joins_others()
        return int(original(self))

    return {"Join._get_num_nonjoined_procs": count_others}


def last_rank_in_common(module: ModuleType) -> dict[str, object]:
    """For ``torch.nn.parallel.distributed``: ranks agree on the last of those that have inputs, which all have."""
    original = module.DistributedDataParallel._find_common_rank

    def find_common_rank(self: DistributedDataParallel, input_rank: int, rank_cond: bool) -> int:
        found = int(original(self, input_rank, rank_cond))
        return self.process_group.size() - 1 if isinstance(self.process_group, RankGroup) else found

    return {"DistributedDataParallel._find_common_rank": find_common_rank}
