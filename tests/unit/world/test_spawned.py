"""Scripts that start their own ranks: the chosen one runs here, the others do not, and all else starts as ever."""

import functools
import importlib
import multiprocessing
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures.process import _process_worker
from contextlib import contextmanager, nullcontext
from multiprocessing.pool import worker
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.data import DataLoader

from fakedist.errors import JobError
from fakedist.options import Job
from fakedist.world.reroute import fake_world
from fakedist.world.spawned import OwnRanks, engines_known

#: (process, rank, world size, argument) of every rank that ran.
ran_here: list[tuple[int, int, int, Any]] = []


@pytest.fixture(autouse=True)
def no_rank_ran() -> None:
    ran_here.clear()


@contextmanager
def chosen(rank: int, world_size: int = 4, **job: Any) -> Iterator[Callable[[], list[str]]]:
    with fake_world(Job(world_size=world_size, rank=rank, target="x", **job)) as notes:
        yield notes


def setup(rank: int, num_ranks: int) -> None:
    dist.init_process_group("gloo", "tcp://127.0.0.1:29511", rank=rank, world_size=num_ranks)


def train(rank: int, num_ranks: int, word: str) -> None:
    """A rank, as the tutorials write it."""
    setup(rank, num_ranks)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    ran_here.append((os.getpid(), dist.get_rank(), int(tensor.item()), word))


def train_on_node(local_rank: int, node: int, num_ranks: int) -> None:
    setup(node * 8 + local_rank, num_ranks)
    ran_here.append((os.getpid(), dist.get_rank(), num_ranks, node))


def train_from_environment() -> None:
    dist.init_process_group("gloo")
    ran_here.append((os.getpid(), dist.get_rank(), dist.get_world_size(), None))


def leave(rank: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=4)
    sys.exit(0)


def fail(rank: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=4)
    raise ValueError(f"rank {rank} fails")


def work(number: int, answers: Any) -> None:
    """Not a rank."""
    answers.put((os.getpid(), number))


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_spawn_runs_the_chosen_rank_here_and_no_other(rank: int) -> None:
    with chosen(rank):
        assert mp.spawn(train, args=(4, "word"), nprocs=4) is None  # type: ignore[no-untyped-call]
        assert not dist.is_initialized()
    assert ran_here == [(os.getpid(), rank, 4, "word")]


def test_spawn_can_be_joined_later() -> None:
    with chosen(1):
        context: Any = mp.start_processes(train, (4, ""), nprocs=4, join=False)  # type: ignore[no-untyped-call]
        assert context.join() is True
        assert [process.exitcode for process in context.processes] == [0] * 4
    assert [ran[1] for ran in ran_here] == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # Python's own says nothing
@pytest.mark.parametrize("make", [mp.get_context("fork").Process, mp.get_context("spawn").Process, threading.Thread])
def test_a_loop_of_processes_or_threads_runs_the_chosen_rank_here(make: Callable[..., Any]) -> None:
    with chosen(2):
        processes = [make(target=train, args=(rank, 4, "")) for rank in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [(getattr(process, "exitcode", 0), process.is_alive()) for process in processes] == [(0, False)] * 4
    assert ran_here == [(os.getpid(), 2, 4, "")]


def test_a_rank_may_be_named_by_its_parameter_alone() -> None:
    with chosen(1):
        for rank in range(4):
            mp.Process(target=train, kwargs={"word": "", "num_ranks": 4, "rank": rank}).start()
    assert [ran[1] for ran in ran_here] == [1]


def test_without_arguments_the_order_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with chosen(1):
        monkeypatch.setenv("WORLD_SIZE", "4")
        for rank in range(4):
            monkeypatch.setenv("RANK", str(rank))
            mp.Process(target=train_from_environment).start()
    assert ran_here == [(os.getpid(), 1, 4, None)]


@pytest.mark.parametrize(("rank", "node"), [(9, 1), (3, 0), (15, 1)])
def test_a_script_that_starts_one_machines_ranks_has_the_chosen_one_among_them(rank: int, node: int) -> None:
    with chosen(rank, 16):
        mp.spawn(train_on_node, (node, 16), nprocs=8)  # type: ignore[no-untyped-call]
    assert ran_here == [(os.getpid(), rank, 16, node)]
    with chosen(rank, 16):  # all ranks of both machines
        mp.spawn(train, (16, ""), nprocs=16)  # type: ignore[no-untyped-call]
    assert [ran[1] for ran in ran_here] == [rank, rank]


def test_a_rank_that_leaves_lets_the_script_go_on_and_its_error_is_the_scripts() -> None:
    with chosen(1):
        mp.spawn(leave, nprocs=4)  # type: ignore[no-untyped-call]
    with chosen(1) as notes:
        with pytest.raises(ValueError, match="rank 1 fails"):
            mp.spawn(fail, nprocs=4)  # type: ignore[no-untyped-call]
        assert notes() == []  # it was run, as one that is stopped after its steps


@pytest.mark.parametrize(
    ("rank", "started", "ran", "told"),
    [
        (9, (16, 8), [], "the script started 8 ranks itself, but none of them is rank 9 of 16"),
        (1, (4, 4), [(1, 4)], "the script joined the job as rank 1 of 4, not as rank 1 of 16"),
    ],
)
def test_a_note_tells_if_the_chosen_rank_is_not_started_or_of_another_world(
    rank: int, started: tuple[int, int], ran: list[tuple[int, int]], told: str
) -> None:
    with chosen(rank, 16) as notes:
        mp.spawn(train, (started[0], ""), nprocs=started[1])  # type: ignore[no-untyped-call]
        assert any(told in note.text for note in notes())
    assert [each[1:3] for each in ran_here] == ran


class Factory:
    """Builds a trainer by a name, as hydra does."""

    def __call__(self, local_rank: int, num_ranks: int, name: str = "train") -> None:
        getattr(importlib.import_module(__name__), name)(local_rank, num_ranks, "")


@pytest.mark.parametrize(
    "function", [Factory(), functools.partial(Factory(), name="train"), lambda *args: Factory()(*args)]
)
def test_a_function_of_as_many_processes_as_ranks_is_a_rank_whatever_it_leads_to(
    function: Callable[[int, int], None],
) -> None:
    with chosen(2) as notes:
        mp.start_processes(function, (4,), nprocs=4, start_method="fork")  # type: ignore[no-untyped-call]
        assert notes() == []
    assert ran_here == [(os.getpid(), 2, 4, "")]


def build_on_node(local_rank: int, name: str) -> None:
    getattr(importlib.import_module(__name__), name)(local_rank, 1, 16)


def test_a_function_of_as_many_processes_as_ranks_of_a_node_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MP_PARALLEL_START", "1")
    with chosen(9, 16):
        mp.start_processes(build_on_node, ("train_on_node",), nprocs=8, start_method="forkserver")  # type: ignore[no-untyped-call]
    assert ran_here == [(os.getpid(), 9, 16, 1)]


def rank_that_starts_a_worker(rank: int, answers: Any) -> None:
    worker = multiprocessing.get_context("fork").Process(target=work, args=(7, answers))
    worker.start()
    worker.join()


def test_a_process_that_a_rank_starts_before_it_joins_is_no_rank() -> None:
    answers = multiprocessing.get_context("fork").SimpleQueue()
    with chosen(2):
        mp.start_processes(rank_that_starts_a_worker, (answers,), nprocs=4)  # type: ignore[no-untyped-call]
    pid, number = answers.get()
    assert number == 7
    assert pid != os.getpid()


def set_one_by_one(name: str, rank: int) -> None:
    os.environ["RANK"] = str(rank)
    getattr(importlib.import_module(__name__), name)()


def set_together(name: str, rank: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    getattr(importlib.import_module(__name__), name)()


def set_a_mapping(name: str, rank: int) -> None:
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "4"})
    getattr(importlib.import_module(__name__), name)()


def set_by_default(name: str, rank: int) -> None:
    os.environ.setdefault("RANK", str(rank))
    getattr(importlib.import_module(__name__), name)()


@pytest.mark.parametrize("target", [set_one_by_one, set_together, set_a_mapping, set_by_default])
def test_a_process_that_sets_its_rank_is_one(monkeypatch: pytest.MonkeyPatch, target: Callable[..., None]) -> None:
    monkeypatch.setenv("RANK", "")
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with chosen(1):
        for rank in range(4):
            mp.Process(target=target, args=("train_from_environment", rank)).start()
    assert [ran[1:3] for ran in ran_here] == [(1, 4)]


def read_rank(answers: Any) -> None:
    """Not a rank, although it asks which one started it."""
    answers.put([os.environ.get(name) for name in ("RANK", "LOCAL_RANK")] + [os.environ["RANK"]])


def test_a_process_that_reads_the_rank_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    answers = multiprocessing.get_context("fork").SimpleQueue()
    with chosen(0):
        process = multiprocessing.get_context("fork").Process(target=read_rank, args=(answers,))
        process.start()
        process.join()
    assert answers.get()[0] == "0"


def train_at_port(port: int, rank: int) -> None:
    train(rank, 4, str(port))


def test_an_integer_that_is_no_rank_is_passed_over() -> None:
    with chosen(1):
        for number in range(4):
            mp.Process(target=lambda *args: train_at_port(*args), args=(29500, number)).start()
    assert ran_here == [(os.getpid(), 1, 4, "29500")]


def test_a_rank_has_run_as_soon_as_it_runs() -> None:
    # Its report is written while it still runs, if it is stopped after its steps.
    seen = []
    with chosen(2) as notes:
        mp.start_processes(lambda rank: seen.append(notes()), nprocs=4, start_method="fork")  # type: ignore[no-untyped-call]
    assert seen == [[]]


def launched(word: str) -> str:
    train_from_environment()
    return word


def elastic(num_nodes: int, per_node: int) -> Any:
    config = LaunchConfig(num_nodes, num_nodes, per_node, run_id="x", rdzv_backend="c10d", start_method="spawn")
    return elastic_launch(config, launched)("hello")


def test_elastic_launch_calls_its_function_here_as_torchrun_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "")
    monkeypatch.delenv("RANK")  # another launcher's environment: the function finds torchrun's
    with chosen(2, launcher="slurm"):
        assert elastic(1, 4) == dict.fromkeys(range(4), "hello")
    assert ran_here == [(os.getpid(), 2, 4, None)]


def test_elastic_launch_of_another_number_of_ranks_is_refused() -> None:
    with chosen(2), pytest.raises(JobError, match="launches 6 ranks, and the job has 4") as refused:
        elastic(2, 3)
    assert refused.value.hint == "fakedist profile --world-size 6"
    assert ran_here == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_are_no_ranks_start(method: str) -> None:
    with chosen(0):
        context = multiprocessing.get_context(method)
        answers = context.SimpleQueue()
        process = context.Process(target=work, args=(7, answers))
        process.start()
        pid, number = answers.get()
        process.join()
    assert (number, process.exitcode) == (7, 0)
    assert pid == process.pid != os.getpid()


def test_a_spawn_that_is_no_rank_starts() -> None:
    with chosen(0):
        answers = mp.get_context("fork").SimpleQueue()
        mp.start_processes(work, (answers,), nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]
        found = sorted(answers.get() for _ in range(2))
    assert len({pid for pid, _ in found} - {os.getpid()}) == 2


def test_data_loaders_managers_and_pools_work_before_and_in_a_rank() -> None:
    with chosen(0):
        for _ in range(2):
            batches = list(DataLoader(list(range(8)), batch_size=4, num_workers=2))
            assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
            with multiprocessing.get_context("fork").Manager() as manager:
                assert manager.list([1])[0] == 1
            with multiprocessing.get_context("fork").Pool(1) as pool:
                assert pool.map(abs, [-1]) == [1]
            if not dist.is_initialized():
                dist.init_process_group("gloo")


@pytest.fixture
def packaged() -> Iterator[types.ModuleType]:
    """A module of vLLM's, whose function starts an engine in a process of its own."""
    module = types.ModuleType("vllm.v1.engine.core")
    exec("def run_engine_core(answers): init_process_group; answers.put(getpid())", module.__dict__)
    module.__dict__.update(init_process_group=None, getpid=os.getpid)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_an_engines_own_process_starts_as_usual(packaged: types.ModuleType) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with chosen(0):
        process = context.Process(target=packaged.run_engine_core, args=(answers,))
        process.start()
        assert answers.get(timeout=30) == process.pid != os.getpid()
        process.join()


def join_alone(answers: Any) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1)
    answers.put((os.getpid(), dist.get_world_size()))


def test_a_script_that_holds_gpu_memory_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fakedist.world.spawned._holds_memory", lambda: True)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with chosen(0):
        process = context.Process(target=join_alone, args=(answers,))
        process.start()
        pid, num_ranks = answers.get(timeout=30)
        assert pid == process.pid != os.getpid()
        assert num_ranks == 1
        process.join()


@pytest.mark.parametrize(
    ("num_ranks", "error"), [(1, ""), (2, "a group of 2 ranks for GPUs"), (4, "is a rank of its own of the job")]
)
def test_a_started_process_joins_a_group_of_its_own_or_none(num_ranks: int, error: str) -> None:
    refused: list[str] = []
    own = OwnRanks(Job(world_size=4, rank=0, target="x"), is_started=True, refuse=refused.append)
    with pytest.raises(RuntimeError, match=error) if error else nullcontext():
        own.joins(0, num_ranks)
    assert refused == ([""] if num_ranks == 4 else []), "it ends the job"


@pytest.mark.parametrize("backend", ["nccl", None, "gloo"])
def test_a_started_process_is_refused_before_it_looks_for_the_others(
    monkeypatch: pytest.MonkeyPatch, backend: str | None
) -> None:
    looked: list[str | None] = []
    monkeypatch.setattr(
        dist.distributed_c10d, "init_process_group", lambda backend=None, *, world_size: looked.append(backend)
    )
    own = OwnRanks(Job(world_size=4, rank=0, target="x"), is_started=True)
    refuses = pytest.raises(RuntimeError, match="a rank of its own") if backend != "gloo" else nullcontext()
    with own.refusing(), refuses:
        dist.init_process_group(backend, world_size=4)
    assert looked == (["gloo"] if backend == "gloo" else [])


class Rank(multiprocessing.Process):
    """A rank, as a subclass whose method it runs."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def run(self) -> None:
        train(self.rank, 4, "mine")


def test_a_subclass_whose_method_joins_is_a_rank_though_the_one_before_left_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fakedist.world.spawned._holds_memory", lambda: bool(ran_here))
    with chosen(1):
        processes = [Rank(rank) for rank in range(4)]
        for process in processes:
            process.start()
            process.join()
    assert ran_here == [(os.getpid(), 1, 4, "mine")]
    assert [process.exitcode for process in processes] == [0] * 4


def test_a_line_states_where_a_script_waits_while_its_ranks_do_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fakedist.world.spawned._IDLE_S", 0.3)
    with chosen(0):
        multiprocessing.Process(target=train, args=(0, 4, "mine")).start()
        multiprocessing.Event().wait(3)
    assert "the script has waited for 0.3 s at " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "called"), [(train, "train"), (worker, "the pool's function"), (_process_worker, "the pool's function")]
)
def test_a_rank_of_a_pool_is_not_called_by_the_name_of_what_the_pool_runs(
    monkeypatch: pytest.MonkeyPatch, target: Callable[..., Any], called: str
) -> None:
    refused: list[str] = []
    process = mp.get_context("spawn").Process(target=target)
    monkeypatch.setattr(multiprocessing, "current_process", lambda: process)
    with pytest.raises(RuntimeError, match="a rank of its own"):
        OwnRanks(Job(world_size=4, rank=0, target="x"), is_started=True, refuse=refused.append).refuse_rank()
    assert refused == [called]


@pytest.mark.parametrize(
    ("rank", "num_ranks", "is_rank"), [("1", "4", True), ("0", "4", False), ("1", "1", False), ("", "4", False)]
)
def test_a_started_process_with_another_rank_among_others_is_a_rank(
    monkeypatch: pytest.MonkeyPatch, rank: str, num_ranks: str, *, is_rank: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", num_ranks)
    assert OwnRanks(Job(world_size=4, rank=0, target="x"), is_started=True).sets_rank() == is_rank


def say(answers: Any) -> None:
    """Whether the process that this runs in may join others."""
    own = OwnRanks(Job(world_size=4, rank=0, target="x"), is_started=True)
    try:
        own.joins(1, 2)
    except RuntimeError as error:
        answers.put(str(error))
    else:
        answers.put("")


@pytest.mark.parametrize(
    ("name", "may_join"), [("vllm.v1.executor", True), ("sglang", True), ("vllm_plugin", False), ("tests", False)]
)
@pytest.mark.parametrize("is_of_the_rank", [True, False])
def test_only_a_process_that_runs_an_engines_function_joins_others(
    monkeypatch: pytest.MonkeyPatch, name: str, *, may_join: bool, is_of_the_rank: bool
) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    monkeypatch.setattr(say, "__module__", name)
    with chosen(0) if is_of_the_rank else engines_known():
        process = context.Process(target=say, args=(answers,))
        process.start()
        said = answers.get()
        process.join()
    assert ("only those that vLLM or SGLang spawn may" in said) != may_join
    assert "FAKEDIST_ENGINE" not in os.environ


def test_a_fork_of_the_rank_that_joins_others_is_refused_even_if_it_is_an_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKEDIST_ENGINE", "1")
    own = OwnRanks(Job(world_size=4, rank=0, target="x"))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="VLLM_WORKER_MULTIPROC_METHOD=spawn"):
        own.joins(1, 2)
