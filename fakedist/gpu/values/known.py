"""What is known about device memory: a record for each storage that something is known about."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fakedist.gpu.values.storage import hold_weakly, storage_address, storage_of

_expired: Callable[[int], object] = torch.UntypedStorage._expired
_free_weak_ref: Callable[[int], object] = torch.UntypedStorage._free_weak_ref


class Choice(NamedTuple):
    """Indices that were picked by made-up values.

    Attributes:
        operation: What picked them.
        filename: The script's file.
        line: The line there.
        num_choices: Among how many.
    """

    operation: str
    filename: str
    line: int
    num_choices: int


class Taint:
    """One origin of made-up values.

    Args:
        parents: The taints of the values that an operation read.
        when_read: Called when the script first reads a value of this origin.
    """

    __slots__ = ("_parents", "_when_read", "teller")

    def __init__(self, parents: tuple[Taint, ...] = (), when_read: Callable[[], object] | None = None) -> None:
        told = bool(parents) and all(parent.teller for parent in parents)
        #: The storage that the script read first; 0 if it has read none, -1 if the parents' values were read before.
        self.teller: int = -1 if told else 0
        self._parents: tuple[Taint, ...] = () if told else parents
        self._when_read = when_read

    def tell(self, teller: int) -> None:
        """Record that the script has read values of this origin from a storage."""
        waiting = [self]
        while waiting:
            taint = waiting.pop()
            if not taint.teller:
                taint.teller = teller
                if taint._when_read is not None:
                    taint._when_read()
                waiting.extend(taint._parents)
                taint._parents = ()


class TaintedBytes:
    """One storage: its taint, and a flag per byte. ``flags`` None: all tainted. ``counted`` True: of all."""

    __slots__ = ("counted", "flags", "taint")

    def __init__(self, taint: Taint, flags: torch.Tensor | None) -> None:
        self.taint = taint
        self.flags = flags
        self.counted: torch.Tensor | bool = False


class Known:
    """What is known about the contents of one storage.

    Attributes:
        key: The storage's identity.
        address: Where its memory is. Facts about a storage that moved since (``resize_``) no longer apply.
        is_whole: Every byte holds a value.
        flags: One flag per byte, set where it holds a value, if it is not whole.
        tainted: Which values are made up, and by what (:mod:`fakedist.gpu.values.taints`).
        share: The mean of all elements (:mod:`fakedist.gpu.values.shares`).
        is_assumed: Whether that mean is made up: half of a mask that nothing is known about.
        recipe: What the values of a large storage follow from (:mod:`fakedist.gpu.values.recipes`).
        losses: How many launches had taken values away when they were last found in place.
        is_positive: If nothing is negative, whether nothing is zero either.
        is_hollow: Whether it is on the host and holds nothing, although it is small enough to be computed.
        choice: Which picked indices it holds, or what follows from them (:mod:`fakedist.gpu.values.routing`).
    """

    __slots__ = (
        *(
            "address",
            "choice",
            "tainted",
            "flags",
            "is_assumed",
            "is_hollow",
            "is_positive",
            "is_whole",
            "key",
            "losses",
            "recipe",
            "share",
        ),
    )

    def __init__(self, key: int, address: int) -> None:
        self.key = key
        self.moved_to(address)

    def moved_to(self, address: int) -> None:
        """Forget everything: the storage's memory is at this address now."""
        self.address = address
        self.is_whole = False
        self.losses = 0
        self.flags: torch.Tensor | None = None
        self.tainted: TaintedBytes | None = None
        self.share: float | None = None
        self.is_assumed = False
        self.is_hollow = False
        self.recipe: object = None
        self.choice: Choice | None = None
        self.is_positive: bool | None = None

    @property
    def is_nothing(self) -> bool:
        """Whether nothing is known."""
        is_empty = not self.is_whole and self.flags is None and self.recipe is None and self.choice is None
        is_empty = is_empty and not self.is_hollow
        return is_empty and self.tainted is None and self.share is None and self.is_positive is None

    @property
    def is_even(self) -> bool:
        """Whether all parts of the storage hold values, and have the same taint or none."""
        return self.is_whole and (self.tainted is None or self.tainted.flags is None)


class Watch:
    """Follows which storages something is known about.

    Attributes:
        told: Called with a storage's identity and 1 for a new fact, -1 for one that was dropped.
        replayed: Called when a CUDA graph was replayed: memory may now hold values that no storage is known for.
    """

    def __init__(self) -> None:
        self.told: Callable[[int, int], object] = lambda storage, more: None
        self.replayed: Callable[[], object] = lambda: None


class Storages:
    """What is known about contents, storage by storage.

    Memory that is freed and allocated again is another storage, and the old facts do not apply to it. A weak reference
    keeps the StorageImpl (not its memory) alive, so no other can take its address.

    Args:
        watch: Follows the storages.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._known: dict[int, Known] = {}
        self._sweep_at = 4096

    def __len__(self) -> int:
        return len(self._known)

    def get(self, tensor: torch.Tensor) -> Known | None:
        """What is known about a tensor's storage; None if nothing is."""
        known = self._known.get(storage_of(tensor)[0])
        return known if known is not None and known.address == storage_address(tensor) else None

    def get_moved(self, tensor: torch.Tensor) -> Known | None:
        """What is known about a tensor's storage, even if that is where the storage was before: it may move back."""
        return self._known.get(storage_of(tensor)[0])

    def make(self, tensor: torch.Tensor) -> Known:
        """What is known about a tensor's storage, for a fact to be added to it."""
        key, address = storage_of(tensor)[0], storage_address(tensor)
        known = self._known.get(key)
        if known is None:
            hold_weakly(tensor)
            return self._add(key, address)
        if known.address != address:
            known.moved_to(address)
        return known

    def make_at(self, key: int, address: int) -> Known:
        """The same for a storage at an address. Its weak reference is the caller's, who leaves it here."""
        known = self._known.get(key)
        if known is None:
            return self._add(key, address)
        _free_weak_ref(key)
        if known.address != address:
            known.moved_to(address)
        return known

    def _add(self, key: int, address: int) -> Known:
        if len(self._known) >= self._sweep_at:
            self.sweep()
        self.watch.told(key, 1)
        known = self._known[key] = Known(key, address)
        return known

    def tidy(self, known: Known) -> None:
        """Some facts were dropped. Drop the rest too if nothing is left."""
        if known.is_nothing:
            self._remove(known.key)

    def _remove(self, key: int) -> None:
        if self._known.pop(key, None) is not None:
            self.watch.told(key, -1)
            _free_weak_ref(key)

    def sweep(self) -> None:
        """Drop what is known about storages that were freed."""
        for key in [key for key in list(self._known) if _expired(key)]:
            self._remove(key)
        self._sweep_at = 2 * len(self._known) + 4096
