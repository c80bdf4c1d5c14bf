"""User buffers of Transformer Engine (common/comm_gemm_overlap/userbuffers): what other ranks answer, the calls made.

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
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed import distributed_c10d as c10d

from fakedist.errors import WorldError
from fakedist.patch import patched
from fakedist.world.process_group import RankGroup
from fakedist.world.symmetric import multicast_object

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
        name = _SOCKET.format(rank, _OPERATION_ID + self._node).encode()
        return (b"\0" + name).ljust(_SOCKET_BYTES, b"\0")


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


def _refuse() -> NoReturn:
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
            _refuse()
        with _active[-1].asked_of(groups[0], groups[-1]):
            original(helper, *groups)

    return init


def buffer_of_ranks(original: Callable[..., None]) -> Callable[..., None]:
    """``CommOverlap.__init__`` and ``CommOverlapP2P.__init__``."""

    def init(*args: object, **kwargs: object) -> None:
        if not _active:
            _refuse()
        with _active[-1].exchanged():
            original(*args, **kwargs)

    return init
