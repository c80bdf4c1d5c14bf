"""The orders in which torch.distributed.pipelining's schedules act: a process of its own, since torch takes seconds.

It reads a JSON list of [schedule, ranks, stages of each rank, micro-batches] from its standard input, and writes one
of [rank of each stage, actions of each rank], or of the reason why the schedule cannot be. An action is [kind, stage,
micro-batch]: F, B (both gradients), I (the gradients of inputs), W (those of weights), SEND_F and the like.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any


def _order(name: str, ranks: int, chunks: int, micro_batches: int) -> list[Any] | str:
    from torch.distributed.pipelining import schedules

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
    return [rank_of, [list(_flat(order[rank])) for rank in range(ranks)]]


def _flat(actions: Iterable[Any]) -> Iterator[tuple[str, int, int]]:
    for action in actions:
        if action is not None and action.sub_actions:
            yield from _flat(action.sub_actions)
        elif action is not None and action.microbatch_index is not None:
            yield action.computation_type.value, action.stage_index, action.microbatch_index


if __name__ == "__main__":
    json.dump([_order(*wanted) for wanted in json.load(sys.stdin)], sys.stdout)
