"""vLLM (0.33.0), and SGLang (0.5.23): what the groups of an engine that shares layers ask the other ranks."""

from __future__ import annotations

import inspect
import os
from types import ModuleType
from typing import Any

import torch.distributed as dist


def calls_of_torch(module: ModuleType) -> dict[str, object]:
    """For ``vllm...device_communicators.pynccl``: as with VLLM_DISABLE_PYNCCL, so that a group's calls are torch's.

    Its own communicator of NCCL waits for the other ranks in the CUDA library, where no process group can answer.
    """
    communicator = getattr(module, "PyNcclCommunicator", None)
    if communicator is None:
        return {}
    make = communicator.__init__

    def disabled(self: Any, group: Any, *args: object, **kwargs: object) -> None:
        if group.size() == 1:
            make(self, group, *args, **kwargs)
            return
        self.group, self.rank, self.world_size = group, group.rank(), group.size()
        self.available, self.disabled = False, True

    return {"PyNcclCommunicator.__init__": disabled}


def groups_without_pynccl(module: ModuleType) -> dict[str, object]:
    """For ``sglang.srt.distributed.parallel_state``: as :func:`calls_of_torch`. A disabled one is enabled in graphs."""
    coordinator = getattr(module, "GroupCoordinator", None)
    if coordinator is None or "use_pynccl" not in inspect.signature(coordinator).parameters:
        return {}
    make = coordinator.__init__
    signature = inspect.signature(make)

    def make_without(*args: object, **kwargs: object) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["use_pynccl"] = False
        make(*bound.args, **bound.kwargs)

    return {"GroupCoordinator.__init__": make_without}


def nodes_of_the_job(module: ModuleType) -> dict[str, object]:
    """For ``vllm.distributed.parallel_state``: which ranks are on one node, as the launcher says it."""
    if not hasattr(module, "in_the_same_node_as"):
        return {}

    def in_the_same_node_as(pg: dist.ProcessGroup, source_rank: int = 0) -> list[bool]:
        ranks = dist.get_process_group_ranks(pg)
        nodes = [rank // int(os.environ["LOCAL_WORLD_SIZE"]) for rank in ranks]
        return [node == nodes[source_rank] for node in nodes]

    return {"in_the_same_node_as": in_the_same_node_as}


def objects_of_groups(module: ModuleType) -> dict[str, object]:
    """For ``vllm...shm_broadcast``: no queue in memory that ranks share. Groups then send objects by torch's calls."""
    queue = getattr(module, "MessageQueue", None)
    if not hasattr(queue, "create_from_process_group"):
        return {}
    return {"MessageQueue.create_from_process_group": staticmethod(lambda *args, **kwargs: None)}


def buffers_of_graphs(module: ModuleType) -> dict[str, object]:
    """For ``vllm...custom_all_reduce``: peers' buffers in a CUDA graph are like mine. It asks for them one by one."""
    if not hasattr(getattr(module, "CustomAllreduce", None), "register_graph_buffers"):
        return {}

    def register_graph_buffers(self: Any) -> None:
        handle, offsets = module.ops.get_graph_buffer_ipc_meta(self._ptr)
        module.ops.register_graph_buffers(self._ptr, [handle] * self.world_size, [offsets] * self.world_size)

    return {"CustomAllreduce.register_graph_buffers": register_graph_buffers}
