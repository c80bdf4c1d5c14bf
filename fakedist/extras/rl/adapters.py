"""Adapters of inference engines and of verl."""

from __future__ import annotations

from fakedist.extras.rl.verl import controller_here, server_of_one, workers_here
from fakedist.extras.rl.vllm import (
    buffers_of_graphs,
    calls_of_torch,
    groups_without_pynccl,
    nodes_of_the_job,
    objects_of_groups,
)
from fakedist.rank.frameworks.adapting import Adapter

#: As of ``adapting``: by the end of a module's full name.
ADAPTERS: dict[str, Adapter] = {
    "vllm.distributed.device_communicators.pynccl": calls_of_torch,
    "sglang.srt.distributed.parallel_state": groups_without_pynccl,
}
#: Those for ranks that do not run. An engine's processes ask each other.
ADAPTERS_FOR_ABSENT_RANKS: dict[str, Adapter] = {
    "vllm.distributed.device_communicators.custom_all_reduce": buffers_of_graphs,
    "vllm.distributed.device_communicators.shm_broadcast": objects_of_groups,
    "vllm.distributed.parallel_state": nodes_of_the_job,
    "ray": controller_here,
    "verl.single_controller.ray.base": workers_here,
    "verl.workers.rollout.llm_server": server_of_one,
}
