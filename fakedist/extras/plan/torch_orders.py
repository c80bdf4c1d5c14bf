"""The orders in which torch.distributed.pipelining's schedules act: a process of its own, since torch takes seconds.

It reads a JSON list of [schedule, ranks, stages of each rank, micro-batches] from its standard input, and writes one
of [rank of each stage, actions of each rank], or of the reason why the schedule cannot be. An action is [kind, stage,
micro-batch]: F, B (both gradients), I (the gradients of inputs), W (those of weights), SEND_F and the like.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any


def order_of(name: str, ranks: int, chunks: int, micro_batches: int) -> Any:
    """The rank of each stage and the actions of each rank, or why the schedule cannot be."""
    from torch.distributed.pipelining import schedules  # the reading half imports this module without torch

    schedule: Any = schedules.get_schedule_class(name)
    number = ranks * chunks
    is_v = schedule in (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV)
    rank_of = [2 * ranks - 1 - stage if is_v and stage >= ranks else stage % ranks for stage in range(number)]
    # Only these of a stage are read before the first step.
    stages: Any = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=number,
            group_size=ranks,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == number - 1,
            has_backward=True,
            submod=None,
            stage_index_to_group_rank=dict(enumerate(rank_of)),
        )
        for stage in range(number)
        if rank_of[stage] == 0
    ]
    has_several = issubclass(schedule, schedules.PipelineScheduleMulti)
    try:
        made = schedule(stages if has_several else stages[0], micro_batches, loss_fn=lambda *_: None)
        order = getattr(made, "pipeline_order_with_comms", None) or made._get_pipeline_order()
    except ValueError as error:
        return str(error)
    flat = [[part for action in order[rank] if action for part in action.sub_actions or (action,)] for rank in order]
    rows = [[[kind.value, stage, batch] for stage, kind, batch, _ in own if batch is not None] for own in flat]
    for own in rows if not has_several else ():  # torch 2.15's 1F1B numbers the last rank's forwards from 1
        for at, one in enumerate(own):
            one[2] = sum(before[0] == one[0] for before in own[:at])
    return [rank_of, rows]


if __name__ == "__main__":
    json.dump([order_of(*wanted) for wanted in json.load(sys.stdin)], sys.stdout)
