"""torch.distributed.pipelining on one stage: what it must know of its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining import stage as stage_module

from fakedist.errors import WorldError
from fakedist.options import Job
from fakedist.rank.frameworks.adapting import adapted_frameworks
from fakedist.rundir.directory import TAPE_NAME, JournalWriter
from fakedist.rundir.tape import Tape
from fakedist.world.reroute import fake_world
from fakedist.world.tapes import Tapes

Enter = Callable[..., Any]
CPU = torch.device("cpu")


def step_of(rank: int, **known: Any) -> list[torch.Tensor]:
    """One step of a stage of four; gives the losses of the last one."""
    stage = PipelineStage(nn.Linear(4, 4), rank, 4, CPU, **known)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    inputs = (torch.ones(8, 4),) if rank == 0 else ()
    last = {"target": torch.ones(8, 4), "losses": losses} if rank == 3 else {}
    schedule.step(*inputs, **last)
    assert all(parameter.grad is not None for parameter in stage.submod.parameters())
    return losses


@pytest.mark.parametrize("rank", [1, 3])
def test_a_later_stage_needs_shapes_told_beforehand_or_a_tape(enter_world: Enter, rank: int) -> None:
    enter_world(4, rank)
    with pytest.raises((WorldError, RuntimeError)) as caught:
        step_of(rank)
    chain = [caught.value, caught.value.__cause__, caught.value.__context__]
    assert any(f"waits for an object from rank {rank - 1}" in str(error) for error in chain)


def test_stages_in_order_need_to_know_nothing_beforehand(tmp_path: Path) -> None:
    others: list[Tape] = []
    for rank in range(4):
        directory = tmp_path / str(rank)
        directory.mkdir()
        writer = JournalWriter(directory / TAPE_NAME)
        tapes = Tapes(writer.append, None, others, rank)
        with fake_world(Job(world_size=4, rank=rank, target="x"), tapes=tapes), adapted_frameworks():
            dist.init_process_group("gloo")
            assert len(step_of(rank)) == (4 if rank == 3 else 0)
        writer.close()
        others.append(Tape(directory, rank))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_first_stage_runs_and_later_ones_with_shapes_given_beforehand(enter_world: Enter, rank: int) -> None:
    enter_world(4, rank)
    shape = (torch.empty(2, 4, requires_grad=True),)
    losses = step_of(rank, **({"input_args": shape, "output_args": shape} if rank else {}))
    assert len(losses) == (4 if rank == 3 else 0)


@pytest.mark.skipif(not hasattr(stage_module.PipelineStage, "_recv_meta"), reason="this torch announces no gradients")
def test_gradients_have_the_shapes_of_the_outputs(enter_world: Enter) -> None:
    enter_world(4, 0)
    stage = PipelineStage(nn.Linear(4, 6), 0, 4, CPU)
    stage._stage_meta.outputs = stage_module.extract_tensor_metas((torch.empty(2, 6, requires_grad=True),))
    (found,) = stage._recv_meta(1).backward_metas
    assert (tuple(found.shape), found.requires_grad) == ((2, 6), False)
