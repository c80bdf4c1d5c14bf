"""The place of a launch, from ranges made by hand; times are numbers, rows are numbered from the top."""

import numpy as np
import pytest

from fakedist.analysis.traces.step_trace import CALL, LAYER, NODE, OPERATION, PHASE, Meaning, Ranges
from fakedist.analysis.traces.traced_step import LaunchSites, launch_sites

MAIN, AUTOGRAD, WORKER = 1, 2, 3
ROWS = [
    # meaning, thread, start, end, autograd's sequence number
    (Meaning(OPERATION, "fakedist::all_reduce"), MAIN, 60, 70, -1),  # row 0: the order of rows says nothing
    (Meaning(CALL, number=5), MAIN, 59, 59, -1),
    (Meaning(LAYER, "mlp", "forward"), MAIN, 10, 50, -1),
    (Meaning(LAYER, "mlp.up", "forward"), MAIN, 20, 30, -1),
    (Meaning(OPERATION, "aten.mm"), MAIN, 22, 26, 7),
    (Meaning(NODE, "MmBackward0"), AUTOGRAD, 80, 90, 7),
    (Meaning(OPERATION, "aten.mm"), AUTOGRAD, 84, 88, 9),
    (Meaning(LAYER, "mlp.up", "forward"), AUTOGRAD, 83, 89, -1),
    (Meaning(NODE, "AddBackward0"), AUTOGRAD, 92, 95, 8),
    (Meaning(PHASE, phase="optimizer"), MAIN, 100, 120, -1),
]


def sites(*launches: tuple[int, int]) -> LaunchSites:
    """Where launches are, each given by thread and time."""
    meanings, thread, start, end, sequence = (list(column) for column in zip(*ROWS, strict=True))
    numbers = [np.array(column, np.int64) for column in (thread, start, end, sequence)]
    ranges = Ranges(meanings, np.arange(len(ROWS), dtype=np.int32), *numbers)
    at = np.array(launches, np.int64)
    return launch_sites(ranges, at[:, 0], at[:, 1])


def test_a_launch_belongs_to_the_innermost_layer_operation_and_phase_of_its_thread() -> None:
    found = sites((MAIN, 24), (MAIN, 28), (MAIN, 40), (MAIN, 55))
    assert found.layer.tolist() == [3, 3, 2, -1]
    assert found.operation.tolist() == [4, -1, -1, -1]
    assert not found.in_node.any()
    found = sites((-1, 24))
    assert (found.layer.tolist(), found.operation.tolist(), found.call.tolist()) == ([-1], [-1], [-1])
    assert sites((MAIN, 24), (MAIN, 40), (MAIN, 110), (WORKER, 110)).phase.tolist() == [3, 2, 9, 9]


def test_a_launch_of_a_collective_has_the_number_of_the_mark_before_it() -> None:
    found = sites((MAIN, 24), (MAIN, 65), (MAIN, 75))
    assert found.call.tolist() == [-1, 5, -1]
    assert found.in_collective.tolist() == [False, True, False]


def test_a_node_belongs_to_the_layer_of_the_forward_operation_with_its_number_or_to_its_own_forward() -> None:
    found = sites((AUTOGRAD, 82), (AUTOGRAD, 93))
    assert found.layer.tolist()[0] == 3
    assert found.operation.tolist() == [5, 8]
    assert found.in_node.tolist() == [True, True]
    assert found.recompute.tolist() == [False, False]
    assert found.unknown.tolist() == [False, True]  # no forward operation has the number 8
    found = sites((AUTOGRAD, 85))
    assert (found.layer.tolist(), found.operation.tolist(), found.recompute.tolist()) == ([7], [6], [True])


@pytest.mark.parametrize(("time", "layer"), [(25, 3), (55, -1)])
def test_a_thread_without_layers_launches_for_the_layer_that_runs(time: int, layer: int) -> None:
    found = sites((MAIN, 24), (MAIN, 25), (WORKER, time))
    assert found.layer.tolist() == [3, 3, layer]
