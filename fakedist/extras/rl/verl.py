"""verl: its controller runs in this process, and so does the worker of the chosen rank, alone of its group (0.9.1).

On a cluster the controller and the worker of each rank are Ray actors. Here a group of workers has one for all ranks.
It computes the chosen rank's part of a batch. The other ranks' results are like its own, at their samples' lengths.

The server of vLLM that shares the rank's GPU is in a Ray actor, as on a cluster. It is the only one, so it generates
for all ranks. What else verl starts in Ray actors (agent loops, rewards, TransferQueue) stays there.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable, Coroutine
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import arange

#: verl's own controllers: classes of ``verl.trainer.main_ppo``.
_CONTROLLERS = {"TaskRunner", "TaskRunnerV1"}


class _Here:
    """Stands in for the handle of a Ray actor. Its methods run in this process, before the caller goes on."""

    def __init__(self, made: object) -> None:
        self._made = made

    def __getattr__(self, name: str) -> SimpleNamespace:
        ray: Any = sys.modules["ray"]
        if name == "__ray_call__":  # the replica of vLLM's server asks where the worker is
            where = ray.get_runtime_context().get_node_id(), os.environ["LOCAL_RANK"]
            return SimpleNamespace(remote=lambda function: ray.put(where))
        return SimpleNamespace(remote=lambda *args, **kwargs: ray.put(self.call(name, *args, **kwargs)))

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, ("the rank's worker",)  # a server keeps the handles, and counts them

    def call(self, name: str, *args: object, **kwargs: object) -> Any:
        """Run a method with its arguments as Ray passes them, and return what it returns."""
        result = getattr(self._made, name)(
            *map(_fetched, args), **{key: _fetched(value) for key, value in kwargs.items()}
        )
        return _finished(result) if inspect.iscoroutine(result) else result


def _fetched(value: object) -> Any:
    ray: Any = sys.modules["ray"]
    return ray.get(value) if isinstance(value, ray.ObjectRef) else value


def _finished(coroutine: Coroutine[Any, Any, object]) -> object:
    """Run it to its end, also where a loop runs in this thread: its caller waits for another process there."""
    outer, loop = asyncio._get_running_loop(), asyncio.new_event_loop()
    asyncio._set_running_loop(None)
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()
        asyncio._set_running_loop(outer)


class _MadeHere:
    """Stands in for the class of a Ray actor."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def options(self, **options: object) -> _MadeHere:
        """Return this class: Ray's options do not apply here."""
        return self

    def remote(self, *args: object, **kwargs: object) -> _Here:
        """Make the object, whose methods then run here."""
        return _Here(self._cls(*args, **kwargs))


def controller_here(module: ModuleType) -> dict[str, object]:
    """For ``ray``: make verl's controller here, not in an actor."""
    if module.__name__ != "ray":
        return {}
    original: Callable[..., Any] = module.remote

    def remote(*args: Any, **kwargs: object) -> object:
        if args and isinstance(args[0], type) and args[0].__name__ in _CONTROLLERS and "verl" in sys.modules:
            return _MadeHere(args[0])
        return original(*args, **kwargs)

    return {"remote": remote}


def workers_here(module: ModuleType) -> dict[str, object]:
    """For ``verl.single_controller.ray.base``: a group has the chosen rank's worker, in this process."""
    if not hasattr(getattr(module, "RayWorkerGroup", None), "execute_all_async"):
        return {}

    def check(self: Any) -> None:
        """Compare the pools with the job's GPUs, in place of the cluster's.

        Raises:
            RuntimeError: The pools are not the ranks of the job.
        """
        gpus, ranks = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        for name, nodes in self.resource_pool_spec.items():
            if list(nodes) != [gpus] * (ranks // gpus):
                raise RuntimeError(
                    f"fakedist: verl's {name} has {len(nodes)} nodes of {nodes[0]} GPUs, and the job {ranks} ranks on "
                    f"nodes of {gpus}: give --world-size {sum(nodes)} --gpus-per-node {nodes[0]}, or set "
                    "trainer.nnodes and trainer.n_gpus_per_node"
                )

    def start(self: Any, resource_pool: Any, ray_cls_with_init: Any, *args: object, **kwargs: object) -> None:
        ranks, gpus = int(os.environ["WORLD_SIZE"]), os.environ["LOCAL_WORLD_SIZE"]
        os.environ.update(WG_PREFIX=self.name_prefix, WG_BACKEND="ray", RAY_LOCAL_WORLD_SIZE=gpus)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # Ray shows an actor no other GPU
        made = _MadeHere(ray_cls_with_init.cls.__ray_actor_class__)
        self._workers = [made.remote(*ray_cls_with_init.args, **ray_cls_with_init.kwargs)] * ranks
        self._worker_names, self._world_size = [f"{self.name_prefix}{rank}" for rank in range(ranks)], ranks
        self._master_addr, self._master_port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    def execute_all_async(self: Any, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        ranks, rank, put = self.world_size, int(os.environ["RANK"]), module.ray.put
        given = [*args, *kwargs.values()]
        is_split = all(isinstance(one, list) and len(one) == ranks for one in given)

        def of(rank: int) -> tuple[list[Any], dict[str, Any]]:
            if not is_split:
                return list(args), kwargs
            return [one[rank] for one in args], {key: one[rank] for key, one in kwargs.items()}

        if method_name.endswith(("_query_dispatch_info", "_query_collect_info")):
            return [put(answer) for answer in _of_ranks(self._workers[0]._made, method_name, of(rank)[0][0], ranks)]
        (mine, *_), more = of(rank)[0] or [None], of(rank)[1]
        had = set(getattr(_fetched(mine), "field_names", ()))
        own = self._workers[0].call(method_name, *of(rank)[0], **more)
        theirs = [(of(other)[0] or [None])[0] for other in range(ranks)]
        return [put(own if other is mine else _as_another(own, _fetched(other), had)) for other in theirs]

    return {
        "ResourcePoolManager._check_resource_available": check,
        "RayWorkerGroup._init_with_resource_pool": start,
        "RayWorkerGroup._init_with_subresource_pool": start,
        "RayWorkerGroup.execute_all_async": execute_all_async,
    }


def _of_ranks(made: Any, method_name: str, mesh: str, ranks: int) -> list[int] | list[bool]:
    """The part of a batch that each rank computes, and whether it answers for it.

    Raises:
        RuntimeError: The worker's engine is not verl's FSDP: others place ranks otherwise.
    """
    worker = next(one for role, one in made.worker_dict.items() if method_name.startswith(f"{role}_"))
    engine = (worker if mesh == "train" else getattr(worker, mesh)).engine
    if "FSDP" not in type(engine).__name__:
        name = type(engine).__name__
        raise RuntimeError(f"fakedist: one rank runs of verl's FSDP, not of its {name}: set strategy=fsdp")
    sharing = ranks // engine.get_data_parallel_size()  # ranks of Ulysses share a part
    is_dispatch = method_name.endswith("_query_dispatch_info")
    return [rank // sharing if is_dispatch else rank % sharing == 0 for rank in range(ranks)]


def _as_another(own: Any, theirs: Any, had: set[str]) -> Any:
    """This rank's result as that of another rank, whose samples are ``theirs``; mine ``had`` these fields before."""
    bridge: Any = sys.modules["verl.utils.transferqueue_utils"]
    if isinstance(own, bridge.BatchMeta):  # of samples in TransferQueue, where a rank writes what it computes
        fields = [name for name in own.field_names if name not in had]
        if not fields:
            return theirs
        lengths = bridge._meta_to_realdata(theirs.select_fields(["input_ids"]))["input_ids"].offsets().diff()
        computed = bridge._meta_to_realdata(own.select_fields(fields)).select(*fields)
        written = bridge._update_meta_with_output(_with_lengths(computed, lengths), theirs)
        written.extra_info = dict(own.extra_info)
        return written
    if isinstance(own, bridge.TensorDict) and own.batch_size:
        return _with_lengths(own, theirs["input_ids"].offsets().diff())
    return own


def _with_lengths(computed: Any, lengths: torch.Tensor) -> Any:
    """Resize my samples to these token lengths."""

    def resized(values: Any) -> Any:
        if not isinstance(values, torch.Tensor):
            return values
        rows = [values[at % len(computed)] for at in range(len(lengths))]
        if not values.is_nested:
            return torch.stack(rows)
        places = [arange(length) % len(row) for row, length in zip(rows, lengths.tolist(), strict=True)]
        return torch.nested.as_nested_tensor(
            [row[place] for row, place in zip(rows, places, strict=True)], layout=torch.jagged
        )

    fields = {name: resized(values) for name, values in computed.items()}
    return type(computed)(fields, batch_size=len(lengths))


def server_of_one(module: ModuleType) -> dict[str, object]:
    """For ``verl.workers.rollout.llm_server``: the server of the chosen rank's GPU is the only one."""
    if not hasattr(getattr(module, "LLMServerManager", None), "_initialize_llm_servers"):
        return {}
    original = module.LLMServerManager.__init__

    def make(self: Any, config: Any, worker_group: Any = None, *args: object, **kwargs: object) -> None:
        original(self, config, worker_group, *args, **kwargs)
        shares = self.rollout_config
        sizes = (shares.tensor_model_parallel_size, shares.data_parallel_size, shares.pipeline_model_parallel_size)
        if worker_group is None or sizes != (1, 1, 1):
            raise RuntimeError(
                "fakedist: one rank runs of verl with a server of vLLM on each GPU: set tensor_model_parallel_size, "
                "data_parallel_size and pipeline_model_parallel_size of actor_rollout_ref.rollout to 1, and nnodes to 0"
            )
        self.worker_group = SimpleNamespace(world_size=1, workers=worker_group.workers)
        self.start_rank = int(os.environ["RANK"])

    return {"LLMServerManager.__init__": make}
