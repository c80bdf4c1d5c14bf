"""A process group's names, ranks, backends and options, and the interface of the ledger that records its calls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import empty
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import Backend, Store, _SymmetricMemory
from torch.distributed import distributed_c10d as c10d

from fakedist.rundir.rows import NO_TERMS, CallTerms
from fakedist.rundir.tape import Channel, ranks_key
from fakedist.world.checks import Tensors


class LedgerLike(Protocol):
    """Records groups and calls."""

    def add_group(self, name: str, description: str, ranks: Sequence[int], group_rank: int, backend: str) -> int:
        """Record a group; returns its number."""

    def add_other_group(self, description: str, ranks: Sequence[int]) -> None:
        """Record a group that this rank is not in."""

    def bind(self, group: int) -> None:
        """Record that a group is bound to its device: NCCL creates the communicator with it, not at the first call."""

    def write(
        self,
        operation: str,
        group: int,
        inputs: Tensors,
        outputs: Tensors,
        *,
        is_async: bool = False,
        peer: int = -1,
        exchanged: tuple[int, int] = (0, 0),
        moved: tuple[int, int] | None = None,
        terms: CallTerms = NO_TERMS,
    ) -> int:
        """Record a call of the group with that number; ``operation`` is all_reduce, all_gather_into_tensor, ...

        ``peer`` is a group rank, -1 for collectives. ``exchanged``: bytes of an all_to_all to or from other ranks,
        largest part and all. ``moved``: bytes in and out of a call on device memory without tensors. ``terms``: what
        its ranks have to agree on. Returns the call's number; -1 if it is not recorded.
        """

    def awaited(self, calls: Sequence[int], device: torch.device | None) -> None:
        """Record that the current stream of a device waits for calls with these numbers; the host without a device."""

    def timed(self, operation: str) -> AbstractContextManager[None] | None:
        """A context that times the call just recorded, on its device; None unless a step is being timed."""


class NullLedger:
    """Records nothing: for a faked world without a recorder."""

    def add_group(self, *args: object) -> int:
        """Do nothing."""
        return 0

    def write(self, *args: object, **kwargs: object) -> int:
        """Do nothing."""
        return -1

    def timed(self, *args: object) -> None:
        """Do nothing."""

    add_other_group = bind = awaited = timed


def _nccl_functions() -> tuple[int, int] | None:
    """Addresses of the virtual GPU's functions by which a pool allocates and frees as NCCL does; None on a real GPU."""
    loaded = ctypes.CDLL(None)
    try:
        functions = loaded.fakedist_nccl_allocate, loaded.fakedist_nccl_free
    except AttributeError:
        return None
    allocate, free = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return allocate, free


#: Untyped: the stubs change with every release, and a group has to fit all of them.
ProcessGroup: Any = dist.ProcessGroup
FakeProcessGroup: Any = torch._C._distributed_c10d.FakeProcessGroup


class OneBackend:
    """Result of ``group._get_backend(device)``: enough of a C++ backend for callers that want its options."""

    supports_time_estimate = False

    def __init__(self, group: BareGroup, backend: str, options: object) -> None:
        self.options = options if options is not None else _default_options(backend)
        self.supports_coalescing = self.supports_splitting = backend == "nccl"
        self._group = group
        self._backend = backend
        self._pool: torch.cuda.MemPool | None = None

    def name(self) -> str:
        """The backend that the script asked for."""
        return self._backend

    def rank(self) -> int:
        """This rank's rank in the group."""
        return self._group._own_rank

    def size(self) -> int:
        """Number of ranks in the group."""
        return self._group._num_ranks

    @property
    def supports_tensor_alloc(self) -> bool:
        """Whether NCCL makes tensors for its collectives: where NVSwitches multicast, on the virtual GPU."""
        return self.supports_tensor_allocation(torch.device("cuda", torch.cuda.current_device()))

    def supports_tensor_allocation(self, device: torch.device | int) -> bool:
        """Whether NCCL makes tensors on a device."""
        index = device if isinstance(device, int) else device.index
        index = torch.cuda.current_device() if index is None else index
        return (
            self._backend == "nccl"
            and _nccl_functions() is not None
            and _SymmetricMemory.has_multicast_support(DeviceType.CUDA, index)
        )

    @property
    def mem_allocator(self) -> Any:  # of no type that all releases name
        """NCCL's allocator, for ``torch.cuda.MemPool``. RuntimeError of another backend, or on a real GPU."""
        functions = _nccl_functions()
        if self._backend != "nccl" or functions is None:
            raise RuntimeError(f"Backend {self._backend} does not implement getMemAllocator")
        return torch._C._cuda_customAllocator(*functions)

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make an empty tensor in NCCL's own pool (``ProcessGroupNCCL::allocateTensor``)."""
        if self._pool is None:
            self._pool = torch.cuda.MemPool(self.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool, torch.cuda.current_device() if device.index is None else device.index):
            return empty(size, dtype=dtype, device=device)

    def register_mem_pool(self, pool: torch.cuda.MemPool, symm: bool = False) -> None:
        """Do nothing: NCCL maps a registered pool for other ranks, and takes no memory for that."""

    def deregister_mem_pool(self, pool: torch.cuda.MemPool) -> None:
        """Do nothing, as :meth:`register_mem_pool`."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: there is no other rank to connect to."""

    def comm_split_count(self) -> int:
        """Number of groups that were split off this one."""
        return self._group.num_splits

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)


class BareGroup(ProcessGroup):  # type: ignore[misc]
    """A process group without its collectives, of a backend such as "nccl" or "cpu:gloo,cuda:nccl".

    ``number`` is its number in the ledger, ``ranks`` its members' ranks in the job, in group order, ``channel`` its
    name on tapes, the same in every member's run, ``num_splits`` the groups split off it.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        *,
        backend: str,
        ledger: LedgerLike,
        options: object,
        store: Store | None = None,
    ) -> None:
        try:
            super().__init__(*(() if store is None else (store,)), rank, num_ranks)
        except TypeError:  # torch 2.10 makes no Python group with a store, and asks none for it
            super().__init__(rank, num_ranks)
        self._own_rank = rank
        self._num_ranks = num_ranks
        self._asked = backend
        self._ledger = ledger
        self.number = 0
        self.ranks: Sequence[int] = range(self._num_ranks)
        self.channel: Channel = (ranks_key(self.ranks), 0)
        self._options = options
        self._label = ""
        self._description = "undefined"
        self._sequence = 0
        self._by_device: dict[str, str] = dict(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map())
        self._backends: dict[str, OneBackend] = {}
        self._store: object = None
        self._holder: Backend | None = None
        self.num_splits = 0

    def named(self, name: str, description: str, number: int, store: object) -> None:
        """Set its name, description, number in the ledger, and store.

        C++ callers look the name up in a registered backend. Torch's ``fake`` backend holds it and is never called.
        """
        self.number = number
        self._store = store
        self._holder = FakeProcessGroup._create_internal(self._own_rank, self._num_ranks, FakeProcessGroup.Options())
        self._hold(ProcessGroup.BackendType.CUSTOM)
        self._set_group_name(name)
        self._set_group_desc(description)

    def _hold(self, kind: object) -> None:
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), kind, self._holder)
        ProcessGroup._set_default_backend(self, kind)

    def backend_of(self, device_type: str) -> str:
        """The backend that serves a device type; if none does, the one that the script asked for."""
        return self._by_device.get(device_type, self._asked)

    @property
    def group_name(self) -> str:
        """Its name in torch.distributed."""
        return self._label

    @property
    def group_desc(self) -> str:
        """Its description."""
        return self._description

    def getGroupName(self) -> str:  # noqa: N802 (called from C++)
        """Same as :attr:`group_name`."""
        return self._label

    def getBackendName(self) -> str:  # noqa: N802 (called from C++)
        """For C++ callers only. DDP's logger treats any group named gloo as a ProcessGroupGloo."""
        return "fakedist"

    def _set_group_name(self, name: str) -> None:
        self._label = name
        super()._set_group_name(name)

    def _set_group_desc(self, description: str) -> None:
        self._description = description
        super()._set_group_desc(description)

    def name(self) -> str:
        """The backend that the script asked for."""
        return self._asked

    def get_group_store(self) -> object:
        """The store that the group was created with."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self._by_device]

    def _get_backend(self, device: torch.device) -> OneBackend:
        name = self.backend_of(torch.device(device).type)
        backend = self._backends.get(name)
        if backend is None:
            backend = self._backends[name] = OneBackend(self, name, self._options)
        return backend

    get_backend = _get_backend

    def _get_backend_name(self) -> str:
        return self._asked

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: there is no other rank to agree with."""

    def _set_default_backend(self, kind: object) -> None:
        """Do nothing: one backend serves all devices."""

    def _set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: no call ever times out."""

    set_timeout = _set_default_timeout = _add_ephemeral_timeout = _set_timeout

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Do nothing: no work is ever pending."""

    def abort(self) -> None:
        """Do nothing: there is no communicator to shut down."""

    shutdown = _shutdown = _abort = abort


def _default_options(backend: str) -> object:
    if backend == "nccl" and hasattr(dist, "ProcessGroupNCCL"):
        return dist.ProcessGroupNCCL.Options()
    return Backend.Options(backend)
