"""Symmetric memory (torch/csrc/distributed/c10d/symm_mem): what other ranks would answer, and the calls it makes.

Each rank puts a description of its memory into the group's store, then passes file descriptors over datagram sockets
that are named by process: ``all_gather_fds`` sends this rank's to its neighbour and receives another's. The others'
descriptions are this rank's own, process included, so it sends to itself, and each descriptor that comes is its own.
Rank 0 then sends everyone a descriptor of the multicast object that it made: here this module does.

Afterwards kernels and copies read the others' memory. Each is a call of the group: a collective of
``torch.ops.symm_mem`` under its name, a copy as ``get`` or ``put``.

User buffers of Transformer Engine (common/comm_gemm_overlap/userbuffers): what other ranks answer, the calls made.

To set them up, the ranks of a domain pass file descriptors over datagram sockets, after a barrier of their group for
each. The sockets are named for a machine's ranks, not for a job: ``ipcSocketInit``. Here the other ranks' sockets take
what this rank sends, and after each barrier it receives what a peer would send: a descriptor of its own memory, or rank
0's multicast object. With ``UB_SKIPMC=1`` they pass CUDA IPC handles through the group instead.

Afterwards kernels send to the others' memory, or copies do, which a kernel ends. Each is a call of the group, on its
stream: bytes and peers are in the kernel's arguments (userbuffers.cu).
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import socket
import struct
import threading
import time
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import distributed_c10d as c10d

from fakedist.errors import WorldError
from fakedist.patch import now_and_when_imported, patched, present
from fakedist.world.process_group import RankGroup

if TYPE_CHECKING:
    from torch._ops import OpOverload


#: A key of ``StoreExchange::all_gather`` (CUDASymmetricMemoryUtils.hpp): its prefix, the exchange's number, a rank.
_KEY = re.compile(r"(?P<exchange>.*SymmetricMemory\w*/\d+)/(?P<rank>\d+)")
#: The beginning of ``RendezvousRequest`` (CUDASymmetricMemory.cu): device, process, bytes of the block.
_REQUEST = struct.Struct("iiQ")
_MARK = "CUDASymmetricMemory/"
#: Its argument is a type of its own in newer releases of torch.
_group_named: Callable[[Any], Any] = present(c10d, "_resolve_process_group")
_NVSHMEM = "nvshmem.core.init_fini"
_FILE = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class Peers:
    """Answers for the other ranks of a job. One for each store, because exchanges follow each other in it."""

    def __init__(self) -> None:
        self._block_bytes = 0
        self._sent: int | None = None  # a multicast object, kept until all ranks have imported it

    def expects(self, key: str, values: Mapping[str, bytes]) -> bool:
        """Whether another rank's key is of an exchange in which this rank takes part."""
        asked = _KEY.fullmatch(key)
        return asked is not None and _own_key(asked["exchange"], values) is not None

    def answer(self, key: str, values: Mapping[str, bytes]) -> bytes | None:
        """The value of another rank's key, given those that this rank has set; None if it is not of an exchange."""
        asked = _KEY.fullmatch(key)
        own = None if asked is None else _own_key(asked["exchange"], values)
        if asked is None or own is None:
            return None
        value = values[own]
        if len(value) <= _REQUEST.size:
            return value
        device, process, block_bytes = _REQUEST.unpack_from(value)
        rank, own_rank = int(asked["rank"]), int(own.rpartition("/")[2])
        self._block_bytes = block_bytes if own_rank else 0
        # No two ranks may have the same device; its number means nothing else to this rank.
        return _REQUEST.pack(own_rank if rank == device else rank, process, block_bytes) + value[_REQUEST.size :]

    def was_set(self, key: str) -> None:
        """This rank has set a key. The first one after the requests is set when all descriptors have arrived."""
        if _MARK not in key:
            return
        if self._sent is not None:
            ctypes.CDLL("libcuda.so.1").cuMemRelease(ctypes.c_void_p(self._sent))
            self._sent = None
        if self._block_bytes:
            self._sent = _send_multicast(self._block_bytes)
            self._block_bytes = 0


def _own_key(exchange: str, values: Mapping[str, bytes]) -> str | None:
    return next((name for name in values if name.rpartition("/")[0] == exchange), None)


class _MulticastProperties(ctypes.Structure):
    _fields_ = [
        ("devices", ctypes.c_uint),
        ("bytes", ctypes.c_size_t),
        ("handle_types", ctypes.c_ulonglong),
        ("flags", ctypes.c_ulonglong),
    ]


def multicast_object(num_ranks: int, num_bytes: int) -> tuple[int, int] | None:
    """Make a multicast object as rank 0 would: its handle and a file descriptor. None: nothing here multicasts."""
    driver = ctypes.CDLL("libcuda.so.1")
    made, file = ctypes.c_void_p(), ctypes.c_int(-1)
    wanted = _MulticastProperties(num_ranks, num_bytes, _FILE, 0)
    if driver.cuMulticastCreate(ctypes.byref(made), ctypes.byref(wanted)):
        return None
    driver.cuMemExportToShareableHandle(ctypes.byref(file), made, _FILE, ctypes.c_ulonglong(0))
    return made.value or 0, file.value


def _send_multicast(num_bytes: int) -> int | None:
    """Send this process a multicast object as rank 0 would, and return it.

    Without NVSwitches that multicast, there is none, and torch does not wait for one.
    """
    made = multicast_object(1, num_bytes)
    if made is None:
        return None
    directory = next(filter(None, map(os.environ.get, ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))), "/tmp")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(f"{directory}/symm_mem-{os.getpid()}")  # send_fds passes no address
        socket.send_fds(sender, [b"fd"], [made[1]])
    os.close(made[1])
    return made[0]


# ---- calls


#: Called where a copy to or from memory of a peer begins and ends, with addresses to and from, bytes, whether it ends.
#: Returns 1 if a kernel that follows ends it.
PeerCopies = Callable[[int, int, int, int], int]


class _Buffer(NamedTuple):
    """A peer's memory, as it is mapped here."""

    start: int
    end: int
    group: RankGroup
    peer: int


class PeerMemory:
    """The memory of other ranks that is mapped here, and the calls that copies to and from it are.

    ``others`` is called with the bytes of a copy to or from other memory of a peer, and returns as :data:`PeerCopies`.
    """

    def __init__(self, others: Callable[[int], int]) -> None:
        self._others = others
        self._buffers: list[_Buffer] = []
        self._groups: dict[tuple[int, ...], RankGroup] = {}
        self._open = threading.local()

    def mapped(self, handle: _SymmetricMemory, group: RankGroup) -> None:
        """Remember the peers' buffers of a rendezvous. Later ones replace those at the same addresses."""
        self._groups[tuple(handle.buffer_ptrs)] = group
        size = handle.buffer_size
        new = [
            _Buffer(start, start + size, group, peer)
            for peer, start in enumerate(handle.buffer_ptrs)
            if peer != handle.rank
        ]
        kept = [own for own in self._buffers if not any(own.start < one.end and one.start < own.end for one in new)]
        self._buffers = sorted([*kept, *new], key=lambda buffer: buffer.start)

    def copied(self, to: int, source: int, num_bytes: int, ends: int) -> int:
        """A copy to or from an address of a peer begins, or ends, in this thread."""
        if ends:
            if (timed := self._open.__dict__.pop("timed", None)) is not None:
                timed.__exit__(None, None, None)
            return 0
        read, written = self._at(source), self._at(to)
        buffer = read or written
        if buffer is None:
            return self._others(num_bytes)
        operation, moved = ("get", (0, num_bytes)) if read else ("put", (num_bytes, 0))
        ledger = buffer.group._ledger
        ledger.write(operation, buffer.group.number, [], [], peer=buffer.peer, moved=moved)
        if (timed := ledger.timed(operation)) is not None:
            timed.__enter__()
            self._open.timed = timed
        return 0

    def group_of(self, handle: _SymmetricMemory) -> RankGroup | None:
        """The group of a rendezvous."""
        return self._groups.get(tuple(handle.buffer_ptrs))

    def _at(self, address: int) -> _Buffer | None:
        index = bisect_right(self._buffers, address, key=lambda buffer: buffer.start) - 1
        return self._buffers[index] if index >= 0 and address < self._buffers[index].end else None


#: Collectives of ``torch.ops.symm_mem`` whose kernels read the others' memory.
_COLLECTIVES = (
    *("one_shot_all_reduce", "one_shot_all_reduce_out", "one_shot_all_reduce_copy", "one_shot_all_reduce_copy_out"),
    *("two_shot_all_reduce_", "two_shot_all_reduce_out", "multimem_all_reduce_", "multimem_one_shot_all_reduce"),
    *("multimem_one_shot_all_reduce_out", "multimem_all_gather_out", "reduce_scatter_out"),
)


@contextmanager
def symmetric_memory(*, is_virtual: bool, others: Callable[[int], int]) -> Iterator[PeerMemory]:
    """Record what symmetric memory does as calls of its group; on a real GPU, refuse it. ``others``: of `PeerMemory`.

    Its kernels wait for signals from the other ranks, which a real GPU would wait for without end.
    """
    memory = PeerMemory(others)
    with ExitStack() as stack:
        stack.enter_context(now_and_when_imported({_NVSHMEM}, _without_nvshmem))
        if is_virtual:
            stack.enter_context(_rendezvous(memory))
            stack.enter_context(_recorded_operations())
        else:
            stack.enter_context(patched(_SymmetricMemory, "rendezvous", staticmethod(_refuse)))
        yield memory


def _refuse(*_: object, **__: object) -> NoReturn:
    raise WorldError(
        "symmetric memory (which asynchronous tensor parallelism uses) waits for signals of other ranks, "
        "which do not exist here",
        "use --device virtual, or turn it off in the script: torch._inductor.config._micro_pipeline_tp = False",
    )


def _without_nvshmem(module: ModuleType) -> None:
    """Have nvshmem4py's ``init`` raise an error: it would wait for the other ranks without end."""
    vars(module)["init"] = _refuse_nvshmem


def _refuse_nvshmem(*_: object, **__: object) -> NoReturn:
    raise WorldError(
        "NVSHMEM waits for the other ranks, which do not exist here",
        "leave nvshmem.core.init() out: symmetric memory of torch, with the CUDA backend, and deep_ep.Buffer run",
    )


@contextmanager
def _rendezvous(memory: PeerMemory) -> Iterator[None]:
    """Report each memory that was exchanged, with its group, and the barriers on it."""
    default_groups: dict[int, str] = {}
    known: set[tuple[str, tuple[int, ...]]] = set()
    backend_of: Callable[[torch.device], str] = present(_SymmetricMemory, "get_backend")

    def empty(*args: object, **kwargs: object) -> torch.Tensor:
        backend = backend_of(torch.device("cuda"))
        if backend in ("NVSHMEM", "NCCL"):
            raise WorldError(
                f"symmetric memory's {backend} backend waits for the other ranks, which do not exist here",
                "use the default one: without TORCH_SYMMMEM and set_backend()",
            )
        tensor: torch.Tensor = original_empty(*args, **kwargs)
        if name := kwargs.get("group_name", args[4] if len(args) > 4 else None):
            default_groups[tensor.data_ptr()] = str(name)
        return tensor

    def rendezvous(tensor: torch.Tensor, group_name: str | None = None) -> _SymmetricMemory | None:
        handle: _SymmetricMemory | None = original(tensor, group_name)
        name = group_name or default_groups.get(tensor.data_ptr())
        if handle is not None and name and (buffers := (name, tuple(handle.buffer_ptrs))) not in known:
            known.add(buffers)
            if isinstance(group := _group_named(name), RankGroup):  # else the peers run, and are not recorded
                memory.mapped(handle, group)
        return handle

    def barrier(handle: _SymmetricMemory, *args: object, **kwargs: object) -> None:
        group = memory.group_of(handle)
        if group is None:
            original_barrier(handle, *args, **kwargs)
        else:
            group.symmetric_barrier(lambda: original_barrier(handle, *args, **kwargs))

    with (
        patched(_SymmetricMemory, "barrier", barrier) as original_barrier,
        patched(_SymmetricMemory, "empty_strided_p2p", staticmethod(empty)) as original_empty,
        patched(_SymmetricMemory, "rendezvous", staticmethod(rendezvous)) as original,
    ):
        yield


@contextmanager
def _recorded_operations() -> Iterator[None]:
    """Register kernels that record the collectives of ``torch.ops.symm_mem`` and run torch's own."""
    library = torch.library.Library("symm_mem", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel")
            for operation in _COLLECTIVES:
                if (packet := getattr(torch.ops.symm_mem, operation, None)) is not None:
                    _record_operation(library, operation, packet.default)
        yield
    finally:
        library._destroy()


def _record_operation(library: torch.library.Library, name: str, operation: OpOverload) -> None:
    names = [argument.name for argument in operation._schema.arguments]
    below = torch.library.get_kernel(operation, "CUDA").call_boxed

    def kernel(keys: Any, *args: Any) -> object:  # the arguments of any operation
        arguments = dict(zip(names, args, strict=False))
        group = _group_named(arguments["group_name"])
        if not isinstance(group, RankGroup):
            return below(keys, *args)
        mine = arguments.get("local_input", arguments["input"])
        written = next((arguments[out] for out in ("out", "output") if out in arguments), mine)
        return group.symmetric(
            f"symm_mem_{name}",
            lambda: below(keys, *args),
            mine,
            written,
            splits_last=bool(arguments.get("split_last_dim")),
        )

    library.impl(name, kernel, "CUDA", with_keyset=True)


#: ``user_buffers_function`` of driver/submit.c: a kernel's name, arguments, blocks and stream, and whether it ended.
_CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_uint64, ctypes.c_int
)
_NOTHING, _MEMORY = 0, 1  # what fakedist_last_export() of driver/mapping.c returns
_MULTICAST_BYTES = 512 << 30  # MULTICAST_GB_TOTAL in userbuffers-host.cpp
_SOCKET, _OPERATION_ID = "tmp/ub-ipc-socket-{}-{:x}", 0xDEADCAFE0000
_SOCKET_BYTES = 108  # sun_path, which Transformer Engine passes whole
_TURN, _TURN_S = b"\0fakedist-user-buffers", 0.01
_LINE = 16  # kernels count in int4
_NAME = re.compile(r"_Z(?P<length>\d+)")
_RANKS = re.compile(r"ILi(?P<ranks>\d+)E")


class BufferCall(NamedTuple):
    """A call that a kernel of user buffers is: bytes of the whole buffer, ``peer`` a rank of the job; -1 for all."""

    operation: str
    num_bytes: int
    peer: int = -1
    num_ranks: int = 1


def read_kernel(
    name: str, argument: Callable[[int, type], int], blocks: int, copied_bytes: int, rank_of: Callable[[int], int]
) -> BufferCall | None:
    """The call that a launch is; None for a kernel that only counts.

    ``argument(position, type)`` is a value of the launch, ``copied_bytes`` what copies moved that this kernel ends,
    ``rank_of`` the rank whose counter is at an address.
    """
    begin = _NAME.match(name)
    if begin is None:
        return None
    kind = name[begin.end() : begin.end() + int(begin["length"])].removeprefix("kuserbuffers_")
    number, address = ctypes.c_int, ctypes.c_uint64
    held = f"_{blocks}sms"
    if kind.startswith("push") and kind != "pushrecv":
        sent = copied_bytes or _LINE * argument(4, number)
        if kind == "pushsendrecv_multiatomic":
            sent *= argument(11, number) - 1
        return BufferCall("put" if copied_bytes else f"userbuffers_send{held}", sent, rank_of(argument(0, address)))
    if kind == "pushrecv":
        return BufferCall("userbuffers_wait", 0, argument(1, number))
    ranks = _RANKS.search(name)
    of = re.match(r"userbuffers_fp16_sum_inplace_gpu_(?P<how>mc|rr|rw)_(?P<what>ag|rs)", kind)
    if of is None or ranks is None:
        return None
    num_ranks = int(ranks["ranks"])
    whole = _LINE * argument(6, number) * num_ranks
    if chunks := {"stride_multiatomic": 9, "atomic_fp8": 15}.get(kind.partition("_oop_")[2]):
        whole *= argument(chunks, number)
    operation = ("multimem_" if of["how"] == "mc" else "") + {"ag": "all_gather", "rs": "reduce_scatter"}[of["what"]]
    return BufferCall(f"userbuffers_{operation}{held}", whole, num_ranks=num_ranks)


class _Thread(threading.local):
    copied_bytes = 0
    sent: BufferCall | None = None  # the last send; the wait that follows it is for as much

    def __init__(self) -> None:
        self.open: list[AbstractContextManager[object]] = []


@contextmanager
def _as_nccl(group: RankGroup) -> Iterator[None]:
    """Tell C++ callers that ask for the group's type of backend that it is NCCL."""
    group._hold(c10d.ProcessGroup.BackendType.NCCL)
    try:
        yield
    finally:
        group._hold(c10d.ProcessGroup.BackendType.CUSTOM)


class UserBuffers:
    """The user buffers of this rank and the calls on them. One domain: Transformer Engine has one communicator."""

    def __init__(self) -> None:
        self._callback: object = None  # what the driver calls must live
        self._group: RankGroup | None = None
        self._domain: RankGroup | None = None
        self._node = 0
        self._thread = _Thread()

    @functools.cached_property
    def _driver(self) -> ctypes.CDLL:
        return ctypes.CDLL("libcuda.so.1")

    def forget(self) -> None:
        """Hear of no more kernels."""
        if self._callback is not None:
            self._driver.fakedist_tell_user_buffers(None)

    # ---- calls

    def copied(self, num_bytes: int) -> int:
        """A copy moves so many bytes to a peer. Returns 1: the kernel that follows makes the call of it."""
        if self._domain is None:
            return 0
        self._thread.copied_bytes += num_bytes
        return 1

    def launched(self, name: bytes, arguments: Any, blocks: int, stream: int, ends: int) -> None:
        """A kernel of user buffers is launched, or was."""
        thread = self._thread
        if ends:
            thread.open.pop().__exit__(None, None, None)
            return
        with ExitStack() as running:
            call = read_kernel(
                name.decode(), lambda at, kind: _value(arguments[at], kind), blocks, thread.copied_bytes, self._rank_of
            )
            if call is not None and self._domain is not None:
                self._group = self._group or _script_group(self._domain)
                self._record(call, self._group, stream, running)
            thread.open.append(running.pop_all())

    def _record(self, call: BufferCall, group: RankGroup, stream: int, running: ExitStack) -> None:
        thread, operation, whole = self._thread, call.operation, call.num_bytes
        if operation == "userbuffers_wait":
            if thread.sent is not None:
                whole = thread.sent.num_bytes
                operation = thread.sent.operation.replace("_send", "_recv").replace("put", "put_wait")
            moved = (0, whole)
        elif call.peer >= 0:
            thread.sent, thread.copied_bytes = call, 0
            moved = (whole, 0)
        else:
            part = whole // call.num_ranks
            moved = (part, whole) if "all_gather" in operation else (whole, part)
        ranks = list(group.ranks)
        peer = ranks.index(call.peer) if call.peer in ranks else -1
        ledger = group._ledger
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            ledger.write(operation, group.number, [], [], peer=peer, moved=moved)
            if (timed := ledger.timed(operation)) is not None:
                running.enter_context(timed)

    def _rank_of(self, counter: int) -> int:
        """``communicator.send_id`` has a counter for each rank, and memory of its own."""
        base = ctypes.c_uint64()
        failed = self._driver.cuMemGetAddressRange_v2(ctypes.byref(base), None, ctypes.c_uint64(counter))
        return -1 if failed else (counter - base.value) // ctypes.sizeof(ctypes.c_int)

    # ---- the other ranks while they are made

    @contextmanager
    def asked_of(self, world: RankGroup, domain: RankGroup) -> Iterator[None]:
        """The ranks of a domain will make user buffers, through these groups."""
        if self._callback is None:
            self._callback = _CALLBACK(self.launched)
            self._driver.fakedist_tell_user_buffers(self._callback)
        self._domain, self._group = domain, None
        self._node = 0 if world is domain else world._own_rank // domain._num_ranks
        with ExitStack() as stack:
            for group in {id(group): group for group in (world, domain)}.values():
                if group._asked == "nccl":  # it then exchanges through memory of the GPU
                    stack.enter_context(_as_nccl(group))
            yield

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """One buffer is made: take what this rank sends to its peers, and send what they would."""
        domain = self._domain
        if domain is None:
            yield
            return
        mine, num_ranks = domain._own_rank, domain._num_ranks
        self._driver.fakedist_last_export(None)
        objects: list[int] = []
        num_barriers = 0

        def barrier(*args: object, **kwargs: object) -> object:
            nonlocal num_barriers
            num_barriers += 1
            done = original(*args, **kwargs)
            file = ctypes.c_int(-1)
            kind = self._driver.fakedist_last_export(ctypes.byref(file))
            if kind == _MEMORY:
                _send(self._socket_name(mine), file.value)
            elif kind == _NOTHING and num_barriers == mine:  # rank 0 sends it to one after the other
                made = multicast_object(num_ranks, _MULTICAST_BYTES)
                if made is not None:
                    objects.append(made[0])
                    _send(self._socket_name(mine), made[1])
            return done

        peers = [peer for peer in range(num_ranks) if peer != mine]
        with ExitStack() as stack:
            stack.enter_context(_turn())
            for peer in peers:
                stack.enter_context(_listening(self._socket_name(peer)))
            original = stack.enter_context(patched(domain, "barrier", barrier))
            yield
        for made in objects:
            self._driver.cuMemRelease(ctypes.c_void_p(made))

    def _socket_name(self, rank: int) -> bytes:
        return (b"\0" + _SOCKET.format(rank, _OPERATION_ID + self._node).encode()).ljust(_SOCKET_BYTES, b"\0")


def _script_group(domain: RankGroup) -> RankGroup:
    """The script's own group of a domain's ranks: of several, the first of those with the most calls."""
    ranks = list(domain.ranks)
    groups = (group for group in c10d._world.pg_map if isinstance(group, RankGroup) and group is not domain)
    return max((group for group in groups if list(group.ranks) == ranks), key=lambda own: own._sequence, default=domain)


def _value(pointer: int, kind: type) -> int:
    value: int = ctypes.cast(pointer, ctypes.POINTER(kind)).contents.value
    return value


@contextmanager
def _turn() -> Iterator[None]:
    """Wait until no other rank on this machine makes user buffers: their sockets have the same names."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as turn:
        while True:
            try:
                turn.bind(_TURN)
                break
            except OSError:
                time.sleep(_TURN_S)
        yield


@contextmanager
def _listening(name: bytes) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer:
        try:
            peer.bind(name)
        except OSError as error:
            raise WorldError(
                f"a job on this machine is making user buffers of Transformer Engine: {error}", "run it again"
            ) from None
        yield


def _send(name: bytes, file: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(name)
        socket.send_fds(sender, [b"\0"], [file])
    os.close(file)


_active: list[UserBuffers] = []


@contextmanager
def user_buffers(*, is_virtual: bool) -> Iterator[Callable[[int], int]]:
    """Let :func:`helper_of_ranks` and :func:`buffer_of_ranks` answer for other ranks; on a real GPU they refuse.

    Yields the function that hears of copies to the others' memory.
    """
    if not is_virtual:
        yield lambda num_bytes: 0
        return
    buffers = UserBuffers()
    _active.append(buffers)
    try:
        yield buffers.copied
    finally:
        _active.remove(buffers)
        buffers.forget()


def _refuse_user_buffers() -> NoReturn:
    raise WorldError(
        "user buffers of Transformer Engine (tp_comm_overlap) wait for signals of other ranks, which do not exist here",
        "use --device virtual, or turn them off in the script",
    )


def helper_of_ranks(original: Callable[..., None]) -> Callable[..., None]:
    """``CommOverlapHelper.__init__``, which takes the groups of all ranks and of the domain."""

    def init(helper: object, *groups: RankGroup) -> None:
        if not groups:  # built for MPI
            raise WorldError(
                "Transformer Engine was built with NVTE_UB_WITH_MPI, so its user buffers call MPI, which has one rank",
                "use the wheel from PyPI",
            )
        if not _active:
            _refuse_user_buffers()
        with _active[-1].asked_of(groups[0], groups[-1]):
            original(helper, *groups)

    return init


def buffer_of_ranks(original: Callable[..., None]) -> Callable[..., None]:
    """``CommOverlap.__init__`` and ``CommOverlapP2P.__init__``."""

    def init(*args: object, **kwargs: object) -> None:
        if not _active:
            _refuse_user_buffers()
        with _active[-1].exchanged():
            original(*args, **kwargs)

    return init
