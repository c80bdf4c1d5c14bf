"""Where the ranks of a group are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupShape:
    """Where the ranks of a group are. A node is an NVLink domain.

    Attributes:
        size: Ranks in it.
        num_nodes: Nodes that have any of them.
        local: Ranks of it in the node that has the fewest: its NICs set the pace.
        own: Ranks of it in this rank's node; 0 stands for as many as ``local``.
    """

    size: int
    num_nodes: int
    local: int
    own: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "own", self.own or self.local)

    @staticmethod
    def of(ranks: Sequence[int], gpus_per_node: int, group_rank: int | None = None) -> GroupShape:
        """The shape of a group of these ranks, in nodes of ``gpus_per_node`` consecutive ranks.

        Args:
            ranks: Its ranks.
            gpus_per_node: GPUs of each node.
            group_rank: This rank's place among them.
        """
        counts = Counter(rank // gpus_per_node for rank in ranks)
        own = 0 if group_rank is None else counts[ranks[group_rank] // gpus_per_node]
        return GroupShape(len(ranks), len(counts), min(counts.values()), own)

    @property
    def is_rail(self) -> bool:
        """Whether the group has several ranks, one on each node."""
        return self.size > 1 and self.num_nodes == self.size
