"""CUDA graphs on the virtual GPU: capture, private pools, replay, and what may not be done meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.virtual import on_virtual_gpu

BODY = """
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
given = torch.randn(64, 512, device="cuda")

def step():
    optimizer.zero_grad(set_to_none=True)
    loss = model(given).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)

launches = gpu.counters()["launches"]
graph = torch.cuda.CUDAGraph(keep_graph=True)
with torch.cuda.graph(graph):
    found["capturing"] = torch.cuda.is_current_stream_capturing()
    step()
captured = gpu.counters()["launches"] - launches
graph.instantiate()
launches = gpu.counters()["launches"]
for _ in range(5):
    graph.replay()
found["kernels"] = captured, (gpu.counters()["launches"] - launches) / 5
found["capturing_after"] = torch.cuda.is_current_stream_capturing()
found["pools"] = len({tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()})

# Streams that a captured stream waits for, or that wait for it, take part in the capture.
other, forked = torch.cuda.Stream(), torch.cuda.CUDAGraph()
with torch.cuda.graph(forked):
    first = given * 2
    event = torch.cuda.current_stream().record_event()
    before = torch.cuda.is_current_stream_capturing()
    with torch.cuda.stream(other):
        found["before_fork"] = torch.cuda.is_current_stream_capturing()
        other.wait_event(event)
        found["after_fork"] = torch.cuda.is_current_stream_capturing()
        second = first + 1
    torch.cuda.current_stream().wait_stream(other)
with torch.cuda.stream(other):
    found["after_capture"] = torch.cuda.is_current_stream_capturing()

def error_of(action):
    broken = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(broken):
            value = given.sum()
            try:
                action(value)
            except RuntimeError as error:
                found.setdefault("inner", []).append(str(error).splitlines()[0])
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""

found["item"] = error_of(lambda value: value.item())
found["synchronize"] = error_of(lambda value: torch.cuda.synchronize())
found["harmless"] = error_of(lambda value: value + 1)

copies = torch.zeros(4, device="cuda")
source = torch.zeros(4, pin_memory=True)
with torch.cuda.graph(copying := torch.cuda.CUDAGraph()):
    copies.copy_(source, non_blocking=True)
source.fill_(7.0)
copying.replay()
found["copied"] = copies.tolist()

generator_graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(generator_graph):
    drawn = torch.randn(4, device="cuda")
generator_graph.replay()
state = torch.cuda.get_rng_state()
graphed = torch.cuda.make_graphed_callables(model, (given.clone().requires_grad_(),))
found["graphed"] = graphed(given).shape == given.shape
graph.reset()
found["refused"] = gpu.refused()
"""


@pytest.fixture(scope="module")
def graphs() -> dict[str, Any]:
    return on_virtual_gpu(BODY)


def test_a_replay_launches_what_was_captured(graphs: dict[str, Any]) -> None:
    during_capture, replayed = graphs["kernels"]  # torch 2.11 sets its random numbers' seed and offset meanwhile
    assert during_capture - 2 <= replayed <= during_capture
    assert replayed > 20


def test_a_capture_has_a_pool_of_its_own_and_ends(graphs: dict[str, Any]) -> None:
    assert (graphs["capturing"], graphs["capturing_after"]) == (True, False)
    assert graphs["pools"] == 2


def test_a_stream_joins_a_capture_by_an_event_and_leaves_it_with_its_end(graphs: dict[str, Any]) -> None:
    assert (graphs["before_fork"], graphs["after_fork"], graphs["after_capture"]) == (False, True, False)


def test_what_would_wait_for_a_captured_stream_is_cudas_own_error(graphs: dict[str, Any]) -> None:
    assert graphs["inner"] == ["CUDA error: operation not permitted when stream is capturing"] * 2
    assert graphs["item"] == "CUDA error: operation failed due to a previous error during capture"
    assert graphs["synchronize"] == graphs["item"]
    assert graphs["harmless"] == ""


def test_copies_of_a_graph_are_done_again(graphs: dict[str, Any]) -> None:
    assert graphs["copied"] == [7.0] * 4


def test_nothing_of_graphs_is_refused(graphs: dict[str, Any]) -> None:
    assert graphs["graphed"]
    assert graphs["refused"] == []
