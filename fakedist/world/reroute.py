"""Replaces every process group with ours, whatever the backend, the rendezvous or the subgroup.

The store that a rendezvous returns: every rank sets what I set.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import empty
from torch._C._distributed_c10d import FakeWork, Store, _register_process_group
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import _disable_current_modes

from fakedist import extras
from fakedist.frames import script_frame
from fakedist.options import Job
from fakedist.patch import patched, present
from fakedist.rundir import notes
from fakedist.rundir.notes import Note
from fakedist.rundir.rows import CallTerms
from fakedist.world.arrivals import Arrivals, Nothing, NotSent, OfRanks
from fakedist.world.checks import reduce_op, root
from fakedist.world.files import saved, sparse_saving, watched_files
from fakedist.world.group import BareGroup, LedgerLike, NullLedger, ProcessGroup
from fakedist.world.objects import faked_objects
from fakedist.world.process_group import Done, RankGroup, done
from fakedist.world.spawned import OwnRanks, is_for_hosts, own_ranks
from fakedist.world.symmetric import PeerCopies, Peers, symmetric_memory, user_buffers
from fakedist.world.tapes import Tapes

if TYPE_CHECKING:
    from torch import FunctionSchema, ScriptObject
    from torch.distributed.distributed_c10d import GroupName


class RankStore(Store):
    """A key-value store with one rank in it.

    A key that only another rank would set comes from that rank's tape, else asking for it raises an error at once.
    Counters count for every rank, so "wait until all have come" ends. The prefix ``name`` separates the keys of stores.
    """

    def __init__(self, num_ranks: int, tapes: Tapes | None = None, name: str = "") -> None:
        super().__init__()
        self._num_ranks = num_ranks
        self._tapes = tapes or Tapes()
        self._name = name
        self._asked: Counter[str] = Counter()
        self._values: dict[str, bytes] = {}
        self._wait_s = timedelta(seconds=1800)
        self._peers = Peers()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._peers.was_set(key)
        self._tapes.stores(self._name + key, self._values[key])

    def get(self, key: str) -> bytes:
        """A value that this rank has set, or that another rank's tape has. WorldError if there is none."""
        if key in self._values:
            return self._values[key]
        if (mirrored := self._peers.answer(key, self._values)) is not None:
            return mirrored
        self._asked[key] += 1
        value = self._tapes.stored(self._name + key, self._asked[key])
        if value is None:
            raise self._tapes.missing_key(self._name + key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add the amount once for every rank; returns the new value."""
        value = int(self._values.get(key, b"0")) + amount * self._num_ranks
        self._values[key] = str(value).encode()
        return value

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set if the value is the expected one, or absent and none is expected; returns the value afterwards."""
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        if self._values.get(key, b"") == wanted:
            self.set(key, desired)
        return self._values.get(key, wanted)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._values[key] = self._values.get(key, b"") + (value.encode() if isinstance(value, str) else bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Several values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Raise WorldError if a key is missing: it would never come."""
        for key in keys:
            if not self.check([key]):
                raise self._tapes.missing_key(self._name + key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return all(self._exists(key) for key in keys)

    def _exists(self, key: str) -> bool:
        if key in self._values or self._tapes.stored(self._name + key, 1) is not None:
            return True
        # In Store::barrier the last rank of a group sets it; the group may be smaller than the counter, all ranks.
        barrier, _, name = key.rpartition("/")
        came = name == "last_member" and f"{barrier}/num_members" in self._values
        return came or self._peers.expects(key, self._values)

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it existed."""
        return self._values.pop(key, None) is not None

    deleteKey = delete_key  # noqa: N815 (C++ callers look it up by this name)
    compareSet = compare_set  # noqa: N815
    multiGet = multi_get  # noqa: N815
    multiSet = multi_set  # noqa: N815

    def num_keys(self) -> int:
        """Number of keys set."""
        return len(self._values)

    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """Return true: append and the multi calls work."""
        return True

    hasExtendedApi = has_extended_api  # noqa: N815

    def set_timeout(self, timeout: timedelta) -> None:
        """Remember the timeout; nothing uses it."""
        self._wait_s = timeout

    @property
    def timeout(self) -> timedelta:
        """The timeout that was set last."""
        return self._wait_s


@contextmanager
def faked_stores(num_ranks: int, tapes: Tapes | None = None) -> Iterator[None]:
    """Replace the script's own stores, which would wait for other ranks; those of one address share their values.

    RecordingError if this torch has none.
    """
    values: dict[object, dict[str, bytes]] = {}

    class TCPStore(RankStore):
        def __init__(
            self, host_name: str, port: int, world_size: int | None = None, *args: object, **kwargs: object
        ) -> None:
            super().__init__(_users(world_size, num_ranks), tapes, f"{host_name}:{port}/")
            self.host, self.port = host_name, port
            self._values = values.setdefault((host_name, port), {})

    class FileStore(RankStore):
        def __init__(self, file_name: str, world_size: int | None = None, *args: object, **kwargs: object) -> None:
            super().__init__(_users(world_size, num_ranks), tapes, f"{file_name}/")
            self.path = file_name
            self._values = values.setdefault(file_name, {})

    with ExitStack() as stack:
        for name, stand_in in (("TCPStore", TCPStore), ("FileStore", FileStore)):
            for owner in (dist, sys.modules["torch.distributed.rendezvous"]):
                stack.enter_context(patched(owner, name, stand_in))
        yield


def _users(num_processes: int | None, num_ranks: int) -> int:
    return num_processes if num_processes is not None and num_processes > 0 else num_ranks


#: A tensor, or tensors in lists of any depth.
Nested = torch.Tensor | Sequence["Nested"]

_num_modes = torch._C._len_torch_dispatch_stack
_mode_at: Callable[[int], object] = torch._C._get_dispatch_stack_at
_transforms = torch._C._are_functorch_transforms_active
_PLAIN = torch.Tensor.__torch_dispatch__
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)

#: The group's methods behind each of c10d's operations; torch releases name them differently.
_METHODS = {
    "allreduce_": ("allreduce",),
    "allreduce_coalesced_": ("allreduce_coalesced",),
    "broadcast_": ("broadcast",),
    "reduce_": ("reduce",),
    "allgather_": ("allgather",),
    "allgather_coalesced_": ("allgather_coalesced",),
    "_allgather_base_": ("_allgather_base", "all_gather_single"),
    "allgather_into_tensor_coalesced_": ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    "gather_": ("gather",),
    "gather_into_tensor_": ("gather_single", "gather_into_tensor"),
    "scatter_": ("scatter",),
    "reduce_scatter_": ("reduce_scatter",),
    "_reduce_scatter_base_": ("_reduce_scatter_base", "reduce_scatter_single"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    "alltoall_": ("alltoall",),
    "alltoall_base_": ("alltoall_base", "all_to_all_single"),
    "send": ("send",),
    "recv_": ("recv",),
    "recv_any_source_": ("recv_anysource",),
}
#: What options hold in addition to the reduction, by the name of the operation's argument.
_OPTIONS = {"root_rank": "rootRank", "async_op": "asyncOp"}
_ALWAYS = {"root_tensor": 0, "timeout": -1, "sparse_indices": None}


class DispatchedGroup(RankGroup):
    """A process group whose calls become operations when something observes operations."""

    #: The work of the call that one of our kernels has just run.
    made: Done | None = None

    def barrier(self, opts: object = None, timeout: timedelta | None = None) -> Done:
        """barrier: every rank has already arrived."""
        if not _is_followed(()):
            return super().barrier(opts, timeout)
        self.made = None
        device = self._barrier_device(opts) or torch.device("cpu")
        ids = list(getattr(opts, "device_ids", None) or [])
        torch.ops.c10d.barrier(empty(0, device=device), self.boxed(), ids, getattr(opts, "asyncOp", True), -1)
        made, self.made = self.made, None
        return made if made is not None else done([])


@contextmanager
def operations_of_groups(keys: Sequence[str] = ("CPU", "CUDA")) -> Iterator[None]:
    """Register kernels that pass c10d's operations to our groups, of "CPU" or "CUDA" tensors.

    Raises:
        RuntimeError: This torch's operations take other arguments.
    """
    library = torch.library.Library("c10d", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel")
            for operation, methods in _METHODS.items():
                if (schema := _schema(operation)) is not None and _can_be_called(schema):
                    for key in keys:
                        library.impl(operation, _kernel(schema, methods[0]), key, allow_override=True)
            for key in keys:
                library.impl("barrier", _barrier, key, allow_override=True)
        yield
    finally:
        library._destroy()


def _schema(operation: str) -> FunctionSchema | None:
    packet = getattr(torch.ops.c10d, operation, None)
    return None if packet is None else packet.default._schema


def _can_be_called(schema: FunctionSchema) -> bool:
    """Torch 2.11 can neither pass a reduction to an operation from Python nor read it back."""
    return hasattr(dist.ReduceOp, "boxed") or all(argument.name != "reduce_op" for argument in schema.arguments)


def _kernel(schema: FunctionSchema, method: str) -> Callable[..., object]:
    names = [argument.name for argument in schema.arguments]
    call = getattr(RankGroup, method)
    gives_tensors = len(schema.returns) > 1
    has_options = "async_op" in names

    def kernel(*args: Any) -> object:  # the arguments of any operation
        arguments = dict(zip(names, args, strict=False))
        group = ProcessGroup.unbox(arguments.pop("process_group"))
        options = SimpleNamespace(asyncOp=arguments.get("async_op", True))
        if "root_rank" in arguments:
            options.rootRank = arguments["root_rank"]
        if "reduce_op" in arguments:
            options.reduceOp = dist.ReduceOp.unbox(arguments.pop("reduce_op"))
        plain = [value for name, value in arguments.items() if name not in _OPTIONS and name not in _ALWAYS]
        group.made = call(group, *plain, *([options] if has_options else []))
        work = FakeWork().boxed()  # a work of ours would not outlive its Python half
        return (args[0], work) if gives_tensors else work

    return kernel


def _barrier(
    tensor: torch.Tensor, boxed: ScriptObject, device_ids: list[int], is_async: bool = True, timeout: int = -1
) -> ScriptObject:
    group = ProcessGroup.unbox(boxed)
    options = SimpleNamespace(device=tensor.device, device_ids=device_ids, asyncOp=is_async)
    group.made = RankGroup.barrier(group, options)
    return FakeWork().boxed()


def _arguments(schema: FunctionSchema, group: DispatchedGroup, arguments: Sequence[object]) -> Iterator[object]:
    special = {"process_group", "reduce_op", *_OPTIONS, *_ALWAYS}
    own = [argument for argument in schema.arguments if argument.name not in special]
    values = {
        argument.name: _nested(value, str(argument.type)) for argument, value in zip(own, arguments, strict=False)
    }
    options = arguments[len(own)] if len(arguments) > len(own) else None
    values |= {**_ALWAYS, "process_group": group.boxed()}
    values["async_op"] = getattr(options, "asyncOp", True)
    for argument in schema.arguments:
        if argument.name == "reduce_op":
            op = reduce_op(options)
            yield (op if isinstance(op, dist.ReduceOp) else dist.ReduceOp(op)).boxed()
        else:
            yield root(options) if argument.name == "root_rank" else values[argument.name]


def _nested(value: object, kind: str) -> object:
    if kind == "List[int]" and isinstance(value, Iterable):
        return [int(one) for one in value]
    if "Tensor" not in kind:
        return value
    depth, inner = 0, value
    while isinstance(inner, Sequence):
        if not inner:
            return value
        depth, inner = depth + 1, inner[0]
    for _ in range(kind.count("List") - depth):
        value = [value]
    return value


def _is_followed(tensors: object) -> bool:
    for index in range(_num_modes()):
        if not type(_mode_at(index)).__module__.startswith("fakedist."):
            return True
    if _transforms():
        return True
    while type(tensors) not in _PLAIN_TYPES:
        if isinstance(tensors, torch.Tensor):
            return type(tensors).__torch_dispatch__ is not _PLAIN
        if not isinstance(tensors, Sequence) or not tensors:
            return False
        tensors = tensors[0]
    return False


def _outputs(tensors: Nested) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [one for listed in tensors for one in _outputs(listed)]


def _as_it_is(group: RankGroup, name: str, tensors: Nested, arguments: Sequence[object]) -> Done:
    made: Done = getattr(RankGroup, name)(group, tensors, *arguments)
    return made


def _dispatched(operation: str, schema: FunctionSchema, name: str) -> Callable[..., Done]:
    @functools.wraps(getattr(RankGroup, name))
    def method(self: DispatchedGroup, tensors: Nested, *args: object) -> Done:
        if not _is_followed(tensors):
            return _as_it_is(self, name, tensors, args)
        self.made = None
        getattr(torch.ops.c10d, operation)(*_arguments(schema, self, (tensors, *args)))
        made, self.made = self.made, None
        return made if made is not None else done(_outputs(tensors))

    return method


def _unseen(name: str) -> Callable[..., Done]:
    """Run without the observers' modes; shapes alone move nothing."""

    @functools.wraps(getattr(RankGroup, name))
    def method(self: DispatchedGroup, tensors: Nested, *args: object) -> Done:
        if not _is_followed(tensors):
            return _as_it_is(self, name, tensors, args)
        outputs = _outputs(tensors)
        if any(type(tensor) not in _PLAIN_TYPES for tensor in outputs):
            return done(outputs)
        with _disable_current_modes():
            return _as_it_is(self, name, tensors, args)

    return method


for _operation, _names in _METHODS.items():
    if (_torch_schema := _schema(_operation)) is not None:
        for _name in _names:
            _made = _dispatched(_operation, _torch_schema, _name) if _can_be_called(_torch_schema) else _unseen(_name)
            setattr(DispatchedGroup, _name, _made)


#: What torch makes groups for that it does not describe, by the function that makes them: FSDP1's HYBRID_SHARD.
_MADE_FOR = {"_init_intra_node_process_group": "fsdp shard", "_init_inter_node_process_group": "fsdp replicate"}
_NON_MEMBER = c10d.GroupMember.NON_GROUP_MEMBER
#: What split_group returns to a rank in none of the parts: None in torch 2.11, later the same as new_group.
_NO_PART = _NON_MEMBER if hasattr(c10d, "_NonGroupMember") else None


class Device(NamedTuple):
    """Functions of the virtual GPU for the stand-in of a library (:mod:`fakedist.extras`).

    ``take(owner, bytes)`` returns the address of memory outside the caching allocator, 0 if none is left; ``free``
    frees it.
    ``routes(indices, num_experts)`` returns the experts of each token on the host, -1 for none, and launches nothing;
    ``indices`` are [tokens, top-k], or a mask, [tokens, experts].
    ``gpus_per_node`` are the ranks of a machine.
    ``experts_of_ranks`` returns those of other ranks' tokens, if this rank's are these; None: they are the same.
    """

    take: Callable[[str, int], int]
    free: Callable[[int], None]
    routes: Callable[[torch.Tensor, int], torch.Tensor]
    gpus_per_node: int = 8
    experts_of_ranks: Callable[[torch.Tensor, Sequence[int]], list[torch.Tensor] | None] | None = None


@contextmanager
def fake_world(
    job: Job,
    ledger: LedgerLike | None = None,
    is_undefined: Callable[[torch.Tensor], bool] | None = None,
    tapes: Tapes | None = None,
    own: OwnRanks | None = None,
    *,
    not_sent: NotSent | None = None,
    tell_peer_copies: Callable[[PeerCopies], None] | None = None,
    device: Device | None = None,
    of_ranks: OfRanks | None = None,
) -> Iterator[Callable[[], list[Note]]]:
    """Make this process one rank of a job whose other ranks are faked. RecordingError if this torch lacks something.

    Yields a function that returns the report's notes, for the end. ``own``: ranks of an active :func:`own_ranks`;
    ``is_undefined``, ``not_sent``, ``of_ranks``: as in :class:`Arrivals`; ``tell_peer_copies`` and ``device`` of the
    virtual GPU.
    """
    arrivals = (Arrivals if job.collectives == "values" else Nothing)(job.seed, is_undefined, tapes, not_sent, of_ranks)
    world = _World(job, ledger or NullLedger(), arrivals)
    hook = sys.excepthook  # init_process_group replaces it
    with ExitStack() as stack:
        if own is None:
            stack.enter_context(own_ranks(world.own_ranks))
        else:
            world.own_ranks = own
        stack.enter_context(patched(c10d, "_new_process_group_helper", world.new_process_group))
        for owner in (c10d, dist, device_mesh):
            stack.enter_context(patched(owner, "split_group", world.split_group(present(owner, "split_group"))))
        for name in ("is_nccl_available", "is_mpi_available", "is_ucc_available", "is_gloo_available"):
            for owner in (c10d, dist):
                stack.enter_context(patched(owner, name, lambda: True))
        stack.enter_context(operations_of_groups(("CUDA",) if world.own_ranks.has_peers else ("CPU", "CUDA")))
        stack.enter_context(world.own_ranks.watching_torch())
        if not world.own_ranks.has_peers:
            stack.enter_context(_absent_ranks(world, job, arrivals.tapes))
        stack.enter_context(watched_files(arrivals.tapes.moved))
        stack.enter_context(faked_objects(world.write_object_call, arrivals.tapes))
        is_virtual = job.device == "virtual"
        sent = stack.enter_context(user_buffers(is_virtual=is_virtual))
        memory = stack.enter_context(symmetric_memory(is_virtual=is_virtual, others=sent))
        if tell_peer_copies is not None:
            tell_peer_copies(memory.copied)
        if is_virtual:
            stack.enter_context(sparse_saving())
        stand_ins = [stack.enter_context(part.stand_in(device)) for part in extras.parts("stand_in")] if device else []
        try:
            yield lambda: [*world.notes(), *(note for notes_of in stand_ins for note in notes_of())]
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            sys.excepthook = hook


@contextmanager
def _absent_ranks(world: _World, job: Job, tapes: Tapes) -> Iterator[None]:
    """Have nothing wait for the other ranks, which do not run: no rendezvous, no store, no barrier among them."""
    with ExitStack() as stack:
        for owner in (c10d, dist, device_mesh):
            stack.enter_context(patched(owner, "new_group", world.new_group(owner.new_group)))
        stack.enter_context(patched(c10d, "rendezvous", world.rendezvous))
        stack.enter_context(patched(c10d, "_store_based_barrier", lambda *args, **kwargs: None))
        stack.enter_context(faked_stores(job.world_size, tapes))
        yield


class _World:
    def __init__(self, job: Job, ledger: LedgerLike, arrivals: Arrivals) -> None:
        self._job = job
        self._ledger = ledger
        self._arrivals = arrivals
        self._store = RankStore(job.world_size, arrivals.tapes)
        self._of_torch: Callable[..., tuple[object, object]] = present(c10d, "_new_process_group_helper")
        self._helper = inspect.signature(self._of_torch)
        self._new_group_with_tag: Callable[..., object] = present(c10d, "_new_group_with_tag")
        self._rank, self._num_ranks = job.rank, job.world_size
        self.own_ranks = OwnRanks(job)
        # torch releases that can keep the order of a group's ranks keep it in split_group.
        has_order = "sort_ranks" in inspect.signature(self._new_group_with_tag).parameters
        self._keeps_order = {"sort_ranks": False} if has_order else {}

    def notes(self) -> list[Note]:
        all_notes = [*self._arrivals.tapes.notes(), *self.own_ranks.notes(), *saved.notes()]
        if (self._rank, self._num_ranks) != (self._job.rank, self._job.world_size):
            all_notes.append(notes.joined_as_another(self._rank, self._num_ranks, self._job.rank, self._job.world_size))
        return all_notes

    def rendezvous(
        self, url: str, rank: int = -1, world_size: int = -1, **_: object
    ) -> Iterator[tuple[RankStore, int, int]]:
        yield (
            self._store,
            rank if rank >= 0 else self._job.rank,
            world_size if world_size >= 0 else self._job.world_size,
        )

    def new_group(self, original: Callable[..., object]) -> Callable[..., object]:
        """Only number a group without this rank. Large jobs create tens of thousands, which would take torch longer
        than all other initialisation.
        """

        @functools.wraps(original)
        def new_group(ranks: object = None, *args: object, **kwargs: object) -> object:
            # Arguments after timeout, backend and options may ask for a barrier among members only: take torch's path.
            plain = len(args) <= 3 and not kwargs.get("use_local_synchronization")
            if plain and isinstance(ranks, (list, tuple, range)) and ranks and self._is_without_me(ranks):
                c10d._world.group_count += 1  # the next group's name counts this one
                members = sorted(ranks)
                c10d._world.pg_group_ranks[_NON_MEMBER] = {rank: number for number, rank in enumerate(members)}
                self._ledger.add_other_group(str(kwargs.get("group_desc") or "") or _made_at(), members)
                return _NON_MEMBER
            return original(ranks, *args, **kwargs)

        return new_group

    def _is_without_me(self, ranks: Sequence[int]) -> bool:
        if c10d._world.default_pg is None or self._rank in ranks:
            return False
        return min(ranks) >= 0 and max(ranks) < self._num_ranks and len(set(ranks)) == len(ranks)

    def new_process_group(self, *args: object, **kwargs: object) -> tuple[object, object]:
        """Do what ``_new_process_group_helper`` does, with our group. Ranks that run have torch's own for hosts."""
        bound = self._helper.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        if self.own_ranks.has_peers and is_for_hosts(arguments["backend"]):
            return self._of_torch(*args, **kwargs)
        ranks, name, tag = arguments["global_ranks_in_group"], arguments["group_name"], arguments["pg_tag"]
        if name in c10d._world.pg_names.values():
            raise ValueError("The specified group name has already been created, please use a different group name")
        if tag and (existing := c10d._find_pg_by_ranks_and_tag(tag, ranks)):
            return existing, c10d._world.pg_map[existing][1]
        if ranks and dist.get_rank() not in ranks:
            self._ledger.add_other_group(arguments["group_desc"] or _made_at(), ranks)
            return _NON_MEMBER, None
        if c10d._world.default_pg is not None and arguments["group_rank"] is None:
            raise AssertionError("Group rank must be specified for group members")  # new_group([])
        size = arguments["group_size"] if arguments["group_size"] > 0 else self._job.world_size
        rank = arguments["group_rank"] if (arguments["group_rank"] or 0) >= 0 else self._job.rank
        if not isinstance(c10d._world.default_pg, BareGroup):
            self.own_ranks.joins(rank or 0, size)
        if c10d._world.default_pg is None:
            self._rank, self._num_ranks = rank or 0, size  # the script may pass other values than its environment has
        if self.own_ranks.has_peers and size > 1 and "gloo" in str(arguments["backend"]):
            raise RuntimeError(
                f"fakedist: an engine's processes join a group of backend {arguments['backend']} for hosts and GPUs at "
                'once, whose host half is not simulated; make one for each: backend="nccl" and backend="gloo"'
            )
        backend = str(arguments["backend"])
        if not any(mark in backend for mark in ",:") and backend not in c10d.Backend.backend_type_map:
            raise AssertionError(f"Unknown backend type {backend}")
        store = c10d.PrefixStore(f"{name}/", self._store if backend == "mpi" else arguments["store"])
        mirrors = RankStore(size, self._arrivals.tapes) if self.own_ranks.has_peers else store
        group = DispatchedGroup(
            rank or 0,
            size,
            backend=backend,
            arrivals=self._arrivals,
            ledger=self._ledger,
            options=arguments.get("backend_options"),
            store=mirrors,
        )
        if arguments["device_id"]:
            group.bound_device_id = arguments["device_id"]
        description = arguments["group_desc"] or "undefined"
        group.ranks = ranks or range(size)
        group.channel = self._arrivals.tapes.channel(group.ranks)
        called = arguments["group_desc"] or _made_at()
        number = self._ledger.add_group(str(name), called, group.ranks, rank or 0, backend)
        if arguments["device_id"]:
            self._ledger.bind(number)
        group.named(name, description, number, store)
        _register(group, backend, store, name, tag)
        return group, store

    def split_group(self, original: Callable[..., object]) -> Callable[..., object]:
        """Split our groups. Those of torch split as ever."""

        @functools.wraps(original)
        def split_group(parent_pg: dist.ProcessGroup | None = None, *args: Any, **kwargs: Any) -> object:
            parent = parent_pg or c10d._get_default_group()
            return (self._split if isinstance(parent, BareGroup) else original)(parent, *args, **kwargs)

        return split_group

    def _split(
        self,
        parent_pg: dist.ProcessGroup | None = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: object = None,
        group_desc: str | None = None,
        *,
        backend: str | None = None,
    ) -> object:
        """Return the part of ``parent_pg`` that contains this rank; ``split_ranks`` are ranks in the parent."""
        if not split_ranks:
            raise ValueError("split_ranks cannot be None or empty")
        if not all(split_ranks) or any(len(part) != len(set(part)) for part in split_ranks):
            raise ValueError("the split group cannot be empty or have duplicate ranks")
        parent = parent_pg or c10d._get_default_group()
        of_parent = dist.get_process_group_ranks(parent)
        mine = None
        for part in split_ranks:
            if dist.get_rank(parent) in part:
                mine = part
            else:
                self._ledger.add_other_group(group_desc or _made_at(), [of_parent[rank] for rank in part])
        if mine is None:
            c10d._process_group_name(split_ranks[0], use_hashed_name=True)  # counts the group, as torch does
            return _NO_PART
        return self._new_group_with_tag(
            [of_parent[rank] for rank in mine],
            timeout=timeout,
            backend=backend or c10d._world.pg_map[parent][0],
            backend_options=pg_options,
            group_desc=group_desc,
            use_local_synchronization=True,  # names the group by a hash of its ranks, as torch does
            **self._keeps_order,
        )

    def write_object_call(
        self, operation: str, pg: BareGroup, pickled_bytes: tuple[int, int], peer: int, terms: CallTerms
    ) -> None:
        """Record an object collective by its pickled bytes, sent and received.

        Allocates and frees torch's tensors: the pickled bytes, their number, and what arrives (``all_gather_object`` in
        torch/distributed/distributed_c10d.py).
        """
        sent_bytes, received_bytes = pickled_bytes
        device = c10d._get_object_coll_device(pg) if torch.cuda.is_available() else "cpu"
        sent = [empty(sent_bytes, dtype=torch.uint8, device=device)]
        received: list[torch.Tensor] = []
        if device == "cuda":
            sent.append(empty(1, dtype=torch.int64, device=device))
            if operation == "all_gather_object":
                received.append(empty(pg.size(), dtype=torch.int64, device=device))
        if received_bytes:
            received.append(empty(received_bytes, dtype=torch.uint8, device=device))
        arrived = received[-1:] if received_bytes else []
        self._ledger.write(operation, pg.number, sent[:1], arrived, peer=peer, terms=terms)


def _made_at() -> str:
    """The name in tables of a group without a description: what torch makes it for, or ``file:line (function)``."""
    frame = script_frame(passed_over=("new_group", "init_process_group"))
    inner: FrameType | None = sys._getframe(1)
    while inner is not None and inner is not frame:
        if name := _MADE_FOR.get(inner.f_code.co_name):
            return name
        inner = inner.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})"


def _register(group: RankGroup, backend: str, store: Store, name: GroupName, tag: str | None) -> None:
    world = c10d._world
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    _register_process_group(name, group)
    world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(backend)))
    if tag:
        tag = f"user:{tag}"
    else:
        tag = f"ptd:{name}"
        world.tags_to_pg.setdefault("", []).append(group)
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
