"""What a process group says of itself: names, ranks, backends, options; as it would in the real job."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from fakedist.world.ledger import LedgerLike
from fakedist.world.work import Done

#: torch's own stubs of it change with every release.
_ProcessGroup: Any = dist.ProcessGroup


class OneBackend:
    """What ``group._get_backend(device)`` gives: enough of a C++ backend for those who ask for its options."""

    supports_splitting = False
    supports_coalescing = True
    supports_time_estimate = False
    supports_tensor_alloc = False

    def __init__(self, group: Group, backend: str, options: object) -> None:
        self.options = options if options is not None else _ProcessGroup.Options(backend)
        self._group = group
        self._backend = backend

    def name(self) -> str:
        """The backend that the script asked for."""
        return self._backend

    def rank(self) -> int:
        """Rank in the group."""
        return self._group._place

    def size(self) -> int:
        """Ranks in the group."""
        return self._group._num_ranks

    def supports_tensor_allocation(self, device: torch.device) -> bool:
        """Never: tensors come from the caching allocator."""
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Nothing to connect."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class Group(_ProcessGroup):  # type: ignore[misc]
    """A process group without its collectives.

    Args:
        place: This rank's place in it, and how many ranks it has.
        backend: The backend that the script asked for, "nccl" or "cpu:gloo,cuda:nccl".
        ledger: Where calls are written down.
        options: The backend options that the script gave.
    """

    def __init__(self, place: tuple[int, int], backend: str, ledger: LedgerLike, options: object) -> None:
        super().__init__(*place)
        self._place: int = place[0]
        self._num_ranks: int = place[1]
        self._asked = backend
        self._ledger = ledger
        self.number = 0
        self._given_options = options
        self._label = ""
        self._description = "undefined"
        self._sequence = 0
        self._backends: dict[str, OneBackend] = {}

    def named(self, name: str, description: str, number: int) -> None:
        """Give it its name, description and number in the ledger.

        C++ callers look the name up in a registered backend. Stock torch's ``fake`` one is registered to hold it; no
        call ever reaches it.
        """
        self.number = number
        holder = FakeProcessGroup._create_internal(self._place, self._num_ranks, FakeProcessGroup.Options())
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), _ProcessGroup.BackendType.CUSTOM, holder)
        _ProcessGroup._set_default_backend(self, _ProcessGroup.BackendType.CUSTOM)
        self._set_group_name(name)
        self._set_group_desc(description)

    @property
    def group_name(self) -> str:
        """Its name in torch.distributed."""
        return self._label

    @property
    def group_desc(self) -> str:
        """Its description."""
        return self._description

    def getGroupName(self) -> str:  # noqa: N802 (called from C++)
        """As :attr:`group_name`."""
        return self._label

    def getBackendName(self) -> str:  # noqa: N802 (called from C++)
        """For C++ callers alone: DDP's logger takes a group called gloo for a ProcessGroupGloo."""
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

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> OneBackend:
        asked = dict(part.split(":", 1) for part in self._asked.split(",") if ":" in part)
        name = asked.get(torch.device(device).type, self._asked)
        return self._backends.setdefault(name, OneBackend(self, name, self._given_options))

    get_backend = _get_backend

    def _get_backend_name(self) -> str:
        return self._asked

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on."""

    def _set_default_backend(self, kind: object) -> None:
        """There is one for all devices."""

    def _set_timeout(self, timeout: timedelta) -> None:
        """Nothing ever times out."""

    set_timeout = _set_default_timeout = _add_ephemeral_timeout = _set_timeout

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """There are none."""

    def abort(self) -> None:
        """Nothing to end."""

    shutdown = _shutdown = _abort = abort

    def _start_coalescing(self, device: torch.device) -> None:
        """Every call is carried out as it comes."""

    def _end_coalescing(self, device: torch.device) -> Done:
        return Done([])
