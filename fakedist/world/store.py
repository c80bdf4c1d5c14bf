"""The store that a rendezvous returns: every rank sets what I set."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from fakedist.patch import patched
from fakedist.world.symmetric import Peers
from fakedist.world.tapes import Tapes


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
