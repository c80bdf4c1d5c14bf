"""verl's controller and the chosen rank's worker in one process, with modules that have the names of verl 0.9.1."""

from __future__ import annotations

import asyncio
import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fakedist.extras.rl.verl import controller_here, server_of_one, workers_here

RANKS, RANK = 4, 1


class ObjectRef:
    """Ray's, of a value in this process."""

    def __init__(self, value: Any) -> None:
        self.value = value


class TensorDict(dict[str, Any]):
    """tensordict's, as far as results have it."""

    def __init__(self, fields: dict[str, Any], batch_size: int) -> None:
        super().__init__(fields)
        self.batch_size = [batch_size]

    def __len__(self) -> int:
        return self.batch_size[0]

    def select(self, *names: str) -> TensorDict:
        return TensorDict({name: self[name] for name in names}, len(self))


class BatchMeta:
    """TransferQueue's, of samples that are in it."""

    def __init__(self, stored: TensorDict) -> None:
        self.stored, self.extra_info = stored, {"step": 3}

    @property
    def field_names(self) -> list[str]:
        return list(self.stored)

    def select_fields(self, names: list[str]) -> BatchMeta:
        return BatchMeta(self.stored.select(*names))


def write(output: TensorDict, meta: BatchMeta) -> BatchMeta:
    meta.stored.update(output)
    return meta


class FSDPEngine:
    """With Ulysses' sequence parallelism of two."""

    def get_data_parallel_size(self) -> int:
        return RANKS // 2


class Worker:
    """verl's ``WorkerDict`` of one role."""

    def __init__(self) -> None:
        self.worker_dict = {"actor": SimpleNamespace(actor=SimpleNamespace(engine=FSDPEngine()))}
        self.given: list[object] = []

    def actor_compute(self, chunk: TensorDict) -> TensorDict:
        self.given.append(chunk)
        rows = [row * 10 for row in chunk["input_ids"].unbind()]
        metrics = {"metrics": {"loss": 0.5}, "plain": torch.arange(len(rows))}
        return TensorDict({"log_probs": nested(rows), **metrics}, batch_size=len(rows))

    def actor_compute_stored(self, chunk: BatchMeta) -> BatchMeta:
        written = write(self.actor_compute(chunk.stored).select("log_probs"), chunk)
        written.extra_info = {"metrics": 0.5}
        return written

    async def actor_update(self, step: int) -> int:
        self.given.append(step)
        return step + 1


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def samples(*lengths: int) -> TensorDict:
    return TensorDict({"input_ids": nested([torch.arange(length) for length in lengths])}, batch_size=len(lengths))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group of workers on two nodes."""
    ray = SimpleNamespace(
        ObjectRef=ObjectRef,
        put=ObjectRef,
        get=lambda reference: reference.value,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "node"),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    bridge = SimpleNamespace(BatchMeta=BatchMeta, TensorDict=TensorDict)
    bridge._meta_to_realdata, bridge._update_meta_with_output = (lambda meta: meta.stored), write
    monkeypatch.setitem(sys.modules, "verl.utils.transferqueue_utils", bridge)
    shape = {"RANK": RANK, "WORLD_SIZE": RANKS, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**shape, "MASTER_ADDR": "here", "MASTER_PORT": 7, "WG_PREFIX": "", "WG_BACKEND": ""}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "")
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    module: Any = ModuleType("verl.single_controller.ray.base")
    assert workers_here(module) == {}
    module.ray, module.RayWorkerGroup = ray, SimpleNamespace(execute_all_async=None)
    replaced: Any = workers_here(module)
    made = SimpleNamespace(name_prefix="group")
    actor = SimpleNamespace(cls=SimpleNamespace(__ray_actor_class__=Worker), args=(), kwargs={})
    replaced["RayWorkerGroup._init_with_resource_pool"](made, None, actor)
    made.world_size, made.check = RANKS, replaced["ResourcePoolManager._check_resource_available"]
    made.execute = lambda *args, **kwargs: replaced["RayWorkerGroup.execute_all_async"](made, *args, **kwargs)
    assert devices == [1]
    return made


def test_the_chosen_rank_computes_its_part_and_the_others_results_have_their_own_lengths(group: Any) -> None:
    parts = [ObjectRef(samples(*lengths)) for lengths in ((2, 3), (4, 2), (4, 2), (5, 1))]
    results = [reference.value for reference in group.execute("actor_compute", parts)]
    (worker,) = {handle._made for handle in group._workers}
    assert worker.given == [parts[RANK].value]
    for part, result in zip(parts, results, strict=True):
        assert result["log_probs"].offsets().tolist() == part.value["input_ids"].offsets().tolist()
        assert (result["metrics"], result["plain"].tolist()) == ({"loss": 0.5}, [0, 1])
    rows = [row.tolist() for row in results[3]["log_probs"].unbind()]
    assert rows == [[0, 10, 20, 30, 0], [0]], "repeated, and cut"


def test_what_the_others_would_write_is_written_for_them(group: Any) -> None:
    parts = [BatchMeta(samples(*lengths)) for lengths in ((2, 3), (4, 2), (4, 2), (5, 1))]
    results = [reference.value for reference in group.execute("actor_compute_stored", list(map(ObjectRef, parts)))]
    assert results == parts
    for part in parts:
        log_probs, given = part.stored["log_probs"], part.stored["input_ids"]
        assert (log_probs.offsets().tolist(), part.extra_info) == (given.offsets().tolist(), {"metrics": 0.5})
    assert [row.tolist() for row in parts[3].stored["log_probs"].unbind()] == [[0, 10, 20, 30, 0], [0]]


def test_a_coroutine_ends_before_the_controller_goes_on_also_within_its_loop(group: Any) -> None:
    async def controller() -> list[int]:
        results = [reference.value for reference in group.execute("actor_update", step=3)]
        await asyncio.sleep(0)
        return results

    assert asyncio.run(controller()) == [4] * RANKS
    assert group._workers[0]._made.given == [3], "once"


def test_ranks_that_share_a_sequence_have_the_same_part_and_one_answers(group: Any) -> None:
    asked = [
        [reference.value for reference in group.execute(f"actor__query_{what}_info", ["actor"] * RANKS)]
        for what in ("dispatch", "collect")
    ]
    assert asked == [[0, 0, 1, 1], [True, False, True, False]]
    group._workers[0]._made.worker_dict["actor"].actor.engine = SimpleNamespace()
    with pytest.raises(RuntimeError, match="of verl's FSDP, not of its SimpleNamespace: set strategy=fsdp"):
        group.execute("actor__query_dispatch_info", ["actor"] * RANKS)


def test_pools_that_are_not_the_jobs_ranks_are_refused(group: Any) -> None:
    group.check(SimpleNamespace(resource_pool_spec={"global_pool": [2, 2]}))
    with pytest.raises(
        RuntimeError, match="has 1 nodes of 8 GPUs, and the job 4 ranks on nodes of 2: give --world-size 8"
    ):
        group.check(SimpleNamespace(resource_pool_spec={"global_pool": [8]}))


def test_a_server_is_told_where_the_worker_is_and_does_not_get_it(group: Any) -> None:
    handle = group._workers[0]
    assert handle.__ray_call__.remote(lambda worker: None).value == ("node", "1")
    assert pickle.loads(pickle.dumps(handle)) == "the rank's worker"


def test_only_verls_controllers_are_made_here(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class TaskRunner:
        def run(self, config: int) -> int:
            return config + 1

    module: Any = ModuleType("ray")
    module.remote = lambda *args: ("an actor", *args)
    assert controller_here(ModuleType("verl.single_controller.ray")) == {}
    remote: Any = controller_here(module)["remote"]
    monkeypatch.delitem(sys.modules, "verl", raising=False)
    assert remote(TaskRunner) == ("an actor", TaskRunner)
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    assert remote(Worker) == ("an actor", Worker)
    runner = remote(TaskRunner).options(num_cpus=1).remote()
    assert runner.run.remote(ObjectRef(3)).value == 4


def test_the_only_server_is_the_chosen_ranks(group: Any) -> None:
    class LLMServerManager:
        def __init__(self, config: Any, worker_group: Any = None, start_rank: int = 0) -> None:
            self.rollout_config, self.worker_group, self.start_rank = config, worker_group, start_rank

        _initialize_llm_servers = None

    module: Any = ModuleType("verl.workers.rollout.llm_server")
    assert server_of_one(module) == {}
    module.LLMServerManager = LLMServerManager
    make: Any = server_of_one(module)["LLMServerManager.__init__"]
    names = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    made, workers = LLMServerManager.__new__(LLMServerManager), ["w0", "w1", "w2", "w3"]
    make(made, SimpleNamespace(**dict.fromkeys(names, 1)), worker_group=SimpleNamespace(workers=workers))
    assert (made.start_rank, made.worker_group.world_size, made.worker_group.workers) == (RANK, 1, workers)
    with pytest.raises(RuntimeError, match="set tensor_model_parallel_size"):
        make(made, SimpleNamespace(**dict.fromkeys(names, 2)), worker_group=SimpleNamespace(workers=workers))
