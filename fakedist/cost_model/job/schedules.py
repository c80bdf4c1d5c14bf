"""Plays the order in which the ranks of a pipeline act: when each action begins and ends.

A rank's GPU and host do its actions one after the other; none begins before the host has come to it, nor before its
input has come. A send begins once the rank has reached it, and a receive ends a transfer's time after its sender has.
Transfers on one stream follow one another; those with nothing in between begin together.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fakedist.errors import JobError

#: Its kind (F, B for both gradients, I for those of inputs, W for those of weights, SEND_F and the like), its stage,
#: and its micro-batch.
Action = tuple[str, int, int]
COMPUTES = ("F", "B", "I", "W")


@dataclass(frozen=True)
class Wire:
    """How ranks transfer: the time of one, the same for all; and whether each neighbour has a stream of its own."""

    transfer_us: float
    is_stream_by_peer: bool


@dataclass(frozen=True)
class PlayedActions:
    """Start and end of each action in microseconds, and when the GPU and the host of each rank are done."""

    times: Mapping[Action, tuple[float, float]]
    gpu_us: Sequence[float]
    host_us: Sequence[float]


def play(
    orders: Sequence[Sequence[Action]],
    rank_of: Sequence[int],
    costs: Mapping[tuple[str, int], tuple[float, float]],
    lead_us: Sequence[float],
    wire: Wire,
) -> PlayedActions:
    """Play the actions of all ranks.

    Args:
        orders: Of each rank, sends and receives among them.
        rank_of: The rank of each stage.
        costs: Time on the GPU and on the host of each kind of action, by stage.
        lead_us: Of each rank, the host before its first action.

    Raises:
        JobError: Ranks wait for each other.
    """
    ways = _Ways(rank_of, costs, wire, [0.0] * len(orders), list(lead_us))
    left = [deque(actions) for actions in orders]
    while any(left) or any(ways.posted.values()):
        before = len(ways.times), sum(map(len, left))
        for rank, actions in enumerate(left):
            while actions and ways.act(rank, actions[0]):
                actions.popleft()
        for stream in list(ways.posted):
            ways.transfer(stream)
        if before == (len(ways.times), sum(map(len, left))):
            raise JobError("the ranks of a pipeline wait for each other", "give each neighbour a stream: nccl-lazy")
    return PlayedActions(ways.times, ways.gpu_us, ways.host_us)


class _Ways:
    """The ranks on their way."""

    def __init__(
        self,
        rank_of: Sequence[int],
        costs: Mapping[tuple[str, int], tuple[float, float]],
        wire: Wire,
        gpu_us: list[float],
        host_us: list[float],
    ) -> None:
        self.rank_of, self._costs, self._wire = rank_of, costs, wire
        self.gpu_us, self.host_us = gpu_us, host_us
        self.times: dict[Action, tuple[float, float]] = {}
        self.posted: dict[tuple[int, int], deque[tuple[Action, float]]] = defaultdict(deque)
        self._sent: dict[Action, float] = {}
        self._free: dict[tuple[int, int], float] = defaultdict(float)
        self._begun: dict[tuple[int, int], tuple[float, float]] = defaultdict(lambda: (-1.0, 0.0))

    def act(self, rank: int, action: Action) -> bool:
        """Do an action, unless it is not known yet when what it waits for ends."""
        kind, stage, _ = action
        if kind.startswith(("SEND", "RECV")):
            peer = self.rank_of[stage + (1 if kind in ("SEND_F", "RECV_B") else -1)]
            self.posted[rank, peer if self._wire.is_stream_by_peer else -1].append((action, self.gpu_us[rank]))
            return True
        needs = self._needs(rank, action)
        if needs is not None and needs not in self.times:
            return False
        ready = 0.0 if needs is None else self.times[needs][1]
        if kind.startswith("WAIT"):
            self.gpu_us[rank] = max(self.gpu_us[rank], ready)
            return True
        gpu_us, host_us = self._costs[kind, stage]
        start = max(self.gpu_us[rank], ready, self.host_us[rank])
        self.host_us[rank] += host_us
        self.gpu_us[rank] = max(start + gpu_us, self.host_us[rank])
        self.times[action] = (start, self.gpu_us[rank])
        return True

    def _needs(self, rank: int, action: Action) -> Action | None:
        """The action that another follows: a transfer, or the one of the stage before or after on this rank."""
        kind, stage, batch = action
        if kind.startswith("WAIT"):
            return kind[5:], stage, batch
        way, other = ("F", stage - 1) if kind == "F" else ("B", stage + 1)
        if kind == "W" or not 0 <= other < len(self.rank_of):
            return None
        if self.rank_of[other] != rank:
            return f"RECV_{way}", stage, batch
        return (way, other, batch) if way == "F" or (way, other, batch) in self.times else ("I", other, batch)

    def transfer(self, stream: tuple[int, int]) -> None:
        """Do the transfers that were reached, as far as their other sides are known."""
        while self.posted[stream]:
            action, posted = self.posted[stream][0]
            kind, stage, batch = action
            begun = self._begun[stream]
            start = begun[1] if begun[0] == posted else max(posted, self._free[stream])
            if kind.startswith("SEND"):
                self._sent[action] = start
            else:
                sent = self._sent.get((f"SEND{kind[4:]}", stage - 1 if kind == "RECV_F" else stage + 1, batch))
                if sent is None:
                    return
                start = max(start, sent)
            self._begun[stream] = (posted, begun[1] if begun[0] == posted else start)
            self.times[action] = (start, start + self._wire.transfer_us)
            self._free[stream] = max(self._free[stream], self.times[action][1])
            self.posted[stream].popleft()


def with_transfers(actions: Sequence[Action], num_stages: int) -> list[Action]:
    """The actions of a rank with sends and receives: where there are none, each is made when it is needed.

    Gradients that were sent are waited for before the next ones are, if forwards and backwards alternate, else at the
    end: as torch.distributed.pipelining's schedules of one stage on each rank do.
    """
    if any(kind.startswith("SEND") for kind, _, _ in actions):
        return list(actions)
    made: list[Action] = []
    sent: list[Action] = []
    alternates = any(before[0] == "B" and after[0] == "F" for before, after in pairwise(actions))
    for kind, stage, batch in actions:
        way, first, last = ("F", 0, num_stages - 1) if kind == "F" else ("B", num_stages - 1, 0)
        made += [(f"RECV_{way}", stage, batch)] * (stage != first) + [(kind, stage, batch)]
        if stage == last:
            continue
        if way == "B":
            made += sent if alternates else []
            sent = [*([] if alternates else sent), ("WAIT_SEND_B", stage, batch)]
        made.append((f"SEND_{way}", stage, batch))
    return made + sent
