"""Object collectives: Python objects from the other ranks.

``torch.distributed`` builds them on sizes that another rank would have sent, so this module replaces each as a whole.
An object comes from the sender's tape. Without one, if this rank is the source or the call collects every rank's
object, the answer follows from "every rank is like me". If the call wants one other rank's object, one that this rank
passed itself stands in for it; without that, the call cannot be answered.

Ranks that run, too, as an engine's processes do, send each other objects through the store of their default group.

Objects are pickled as ``_object_to_tensor`` and ``_tensor_to_object`` in torch/distributed/distributed_c10d.py do it,
in this process. A tape's objects contain only what the script itself exchanges.
"""

from __future__ import annotations

import functools
import io
import pickle
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from fakedist.errors import WorldError
from fakedist.patch import patched, present
from fakedist.rundir.rows import NO_TERMS, CallTerms
from fakedist.rundir.tape import ANY_RANK
from fakedist.world.group import BareGroup
from fakedist.world.tapes import Tapes, Where

#: Number of tensor collectives that each makes in torch; the group's sequence number grows by it.
_NUM_CALLS = {
    "all_gather_object": 2,
    "broadcast_object_list": 2,
    "gather_object": 2,
    "recv_object_list": 0,
    "scatter_object_list": 3,
    "send_object_list": 0,
}

#: The module that starts RPC.
_RPC = "torch.distributed.rpc.backend_registry"
#: Names of the bool type: Python's, and both of NumPy's.
_BOOLS = ("bool", "bool_")
#: Called with (operation, group, bytes sent and received, group rank of the peer, terms) for each call.
Write = Callable[[str, BareGroup, tuple[int, int], int, CallTerms], None]


class PeerTapes(Tapes):
    """Objects of ranks that run: they come through the store of the default group. Nothing is written."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[Where] = Counter()

    def send_objects(self, where: Where, objects: Sequence[bytes]) -> None:
        """Send pickled objects."""
        _store().set(self._key(where), pickle.dumps(list(objects)))  # type: ignore[arg-type]  # it takes bytes, too

    def receive_objects(self, where: Where, num_objects: int) -> list[bytes] | None:
        """Wait for the pickled objects that a rank sends in this call. None if any rank may send them."""
        if where.source == ANY_RANK:
            return None
        objects: list[bytes] = pickle.loads(_store().get(self._key(where)))
        return objects

    def _key(self, where: Where) -> str:
        self._calls[where] += 1
        return f"fakedist/{where}/{self._calls[where]}"


def _store() -> Store:
    store: Store = c10d._world.pg_map[c10d._get_default_group()][1]
    return store


class _StandIn(NamedTuple):
    make: Callable[[], object]
    yields_to_tape: bool


_stand_in: ContextVar[_StandIn | None] = ContextVar("stand_in", default=None)


@contextmanager
def faked_objects(write: Write, tapes: Tapes) -> Iterator[None]:
    """Replace the object collectives of ``torch.distributed``. RecordingError if this torch lacks one of them."""
    answers = _Answers(write, tapes)
    with ExitStack() as stack:
        for name in _NUM_CALLS:
            for owner in (c10d, dist):
                answer = _for_our_groups(getattr(answers, name), present(owner, name), answers.refused)
                stack.enter_context(patched(owner, name, answer))
        if _RPC in sys.modules:  # torch.distributed imports it, if torch was built with it
            stack.enter_context(_no_other_workers(sys.modules[_RPC]))
        yield


def _for_our_groups(
    answer: Callable[..., object], original: Callable[..., object], refused: Callable[[], None]
) -> Callable[..., object]:
    """Use torch's own for its own groups, and for a bare backend, as ``rpc.init_rpc`` makes one."""
    kinds = (torch._C._distributed_c10d.Backend, dist.ProcessGroup)

    @functools.wraps(original)
    def called(*args: object, **kwargs: object) -> object:
        groups = [value for value in (*args, *kwargs.values()) if isinstance(value, kinds)]
        group = next(iter(groups), c10d._world.default_pg)
        is_torchs = isinstance(group, kinds) and not isinstance(group, BareGroup)
        try:
            return (original if is_torchs else answer)(*args, **kwargs)
        except WorldError:
            refused()
            raise

    return called


@contextmanager
def _no_other_workers(registry: ModuleType) -> Iterator[None]:
    """Refuse RPC among processes: no other rank runs its functions. RecordingError if torch starts it otherwise."""

    def init_process_group(store: object, rank: int, world_size: int) -> object:
        if world_size > 1:
            raise WorldError(
                f"rpc.init_rpc waits for {world_size} workers, and only this rank runs: no other can call it or answer",
                "collectives are simulated; RPC is only with world_size=1",
            )
        return original(store, rank, world_size)

    with patched(registry, "_init_process_group", init_process_group) as original:
        yield


@contextmanager
def standing_in(make: Callable[[], object], tape: Literal["passed over", "else"] = "passed over") -> Iterator[None]:
    """While active, let ``make``'s objects stand in for other ranks': before a tape's, or (``tape="else"``) after."""
    token = _stand_in.set(_StandIn(make, tape == "else"))
    try:
        yield
    finally:
        _stand_in.reset(token)


class _Answers:
    def __init__(self, write: Write, tapes: Tapes) -> None:
        self._write_call = write
        self._tapes = tapes
        self._begun: tuple[str, BareGroup, int, CallTerms] | None = None

    def refused(self) -> None:
        """Write a call that another rank's tape does not answer: ``match`` says what it meets."""
        self._write(0, 0)

    def all_gather_object(
        self,
        object_list: list[object],
        obj: object,
        group: dist.ProcessGroup | None = None,
        *,
        weights_only: bool = False,
    ) -> None:
        if _is_outside(group, "all_gather_object"):
            return
        pg = _group(group)
        where = self._begin("all_gather_object", pg)
        pickled = _dump(obj, weights_only)
        self._tapes.send_objects(where, [pickled])
        objects = [self._of(where._replace(source=rank), pickled) for rank in pg.ranks]
        self._write(len(pickled), max(map(len, objects)) * len(objects))
        _fill(object_list, objects, weights_only)

    def gather_object(
        self,
        obj: object,
        object_gather_list: list[object] | None = None,
        dst: int | None = None,
        group: dist.ProcessGroup | None = None,
        group_dst: int | None = None,
        *,
        weights_only: bool = False,
    ) -> None:
        pg = _group(group)
        to = _group_rank(pg, dst, group_dst)
        if _is_outside(pg, "gather_object"):
            return
        c10d._validate_output_list_for_rank(pg.rank(), to, object_gather_list)
        where = self._begin("gather_object", pg, CallTerms(root=to))._replace(to=pg.ranks[to])
        pickled = _dump(obj, weights_only)
        if object_gather_list is None or pg.rank() != to:
            self._tapes.send_objects(where, [pickled])
            self._write(len(pickled), 0)
            return
        objects = [self._of(where._replace(source=rank), pickled) for rank in pg.ranks]
        self._write(len(pickled), max(map(len, objects)) * len(objects))
        _fill(object_gather_list, objects, weights_only)

    def broadcast_object_list(
        self,
        object_list: list[object],
        src: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: object = None,
        group_src: int | None = None,
        *,
        weights_only: bool = False,
    ) -> None:
        pg = _group(group)
        source = _group_rank(pg, src, group_src)
        if _is_outside(pg, "broadcast_object_list"):
            return
        terms = CallTerms(root=source, parts=(f"objects {len(object_list)}",))
        where = self._begin("broadcast_object_list", pg, terms)._replace(source=pg.ranks[source])
        if pg.rank() == source:
            self._give(where, object_list, weights_only)
        else:
            self._take(where, object_list, weights_only)

    def scatter_object_list(
        self,
        scatter_object_output_list: list[object],
        scatter_object_input_list: Sequence[object] | None = None,
        src: int | None = None,
        group: dist.ProcessGroup | None = None,
        group_src: int | None = None,
        *,
        weights_only: bool = False,
    ) -> None:
        """Take this rank's item of the list: its own as the source, else the tape's, else the one it passed anyway."""
        pg = _group(group)
        source = _group_rank(pg, src, group_src)
        if _is_outside(pg, "scatter_object_list"):
            return
        output, items = scatter_object_output_list, scatter_object_input_list
        if not isinstance(output, list) or not output:
            raise ValueError("Expected argument scatter_object_output_list to be a list of size at least 1.")
        where = self._begin("scatter_object_list", pg, CallTerms(root=source))._replace(source=pg.ranks[source])
        if pg.rank() == source:
            if items is None:
                raise ValueError("source rank must provide non-None scatter_object_input_list")
            output[0] = _load(self._give(where, items, weights_only)[pg.rank()], weights_only)
        else:
            received = self._received(where, pg.size())
            stand_in = _stand_in.get()
            self._write(0, max(map(len, received or [b""])))
            if received is not None:
                output[0] = _load(received[pg.rank()], weights_only)
            elif stand_in is not None:
                output[0] = stand_in.make()
            else:
                mine = items[pg.rank()] if items else None
                output[0] = output[0] if mine is None else mine
                self._keep(where, where.operation, output[:1])

    def send_object_list(
        self,
        object_list: list[object],
        dst: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: object = None,
        group_dst: int | None = None,
        *,
        use_batch: bool = False,
        weights_only: bool = False,
    ) -> None:
        pg = _group(group)
        _check_inside(pg)
        to = c10d._canonicalize_group_rank(pg, dst, group_dst)
        c10d._check_not_self_rank(pg, to, "destination")
        where = self._begin("send_object_list", pg, peer=to)._replace(to=pg.ranks[to])
        self._give(where, object_list, weights_only)

    def recv_object_list(
        self,
        object_list: list[object],
        src: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: object = None,
        group_src: int | None = None,
        *,
        use_batch: bool = False,
        weights_only: bool = False,
    ) -> int:
        pg = _group(group)
        _check_inside(pg)
        source = peer = ANY_RANK
        if src is not None or group_src is not None:
            peer = c10d._canonicalize_group_rank(pg, src, group_src)
            c10d._check_not_self_rank(pg, peer, "source")
            source = pg.ranks[peer]
        where = self._begin("recv_object_list", pg, peer=peer)
        where = where._replace(operation="send_object_list", source=source, to=dist.get_rank())
        if (sender := self._tapes.sender(where)) is not None:
            where = where._replace(source=sender)
        self._take(where, object_list, weights_only)
        return where.source if where.source != ANY_RANK else int(pg.ranks[0])

    def _begin(self, operation: str, pg: BareGroup, terms: CallTerms = NO_TERMS, peer: int = ANY_RANK) -> Where:
        calls = _NUM_CALLS[operation]
        pg._sequence += calls
        self._begun = operation, pg, peer, terms
        return Where(operation, pg.channel, dist.get_rank(), sequence=pg._sequence if calls else 0)

    def _write(self, sent_bytes: int, received_bytes: int) -> None:
        if self._begun is not None:
            operation, pg, peer, terms = self._begun
            self._begun = None
            self._write_call(operation, pg, (sent_bytes, received_bytes), peer, terms)

    def _of(self, where: Where, mine: bytes) -> bytes:
        if where.source == dist.get_rank():
            return mine
        objects = self._tapes.receive_objects(where, 1)
        return mine if objects is None else objects[0]

    def _give(self, where: Where, objects: Sequence[object], weights_only: bool) -> list[bytes]:
        pickled = [_dump(one, weights_only) for one in objects]
        self._tapes.send_objects(where, pickled)
        self._write(sum(map(len, pickled)), 0)
        return pickled

    def _take(self, where: Where, objects: list[object], weights_only: bool) -> None:
        name = where.operation.replace("send", "recv")
        received = self._received(where, len(objects))
        stand_in = _stand_in.get()
        self._write(0, sum(map(len, received or [])))
        if received is not None:
            objects[:] = [_load(one, weights_only) for one in received]
        elif stand_in is not None:
            objects[:] = [stand_in.make()]
        else:
            self._keep(where, name, objects)

    def _keep(self, where: Where, name: str, objects: Sequence[object]) -> None:
        """Let this rank's own objects stand in for another's. WorldError if all are None or one is a bool.

        A flag decides what both ranks do next, and this rank's own would be a coin toss.
        """
        if any(type(item).__name__ in _BOOLS for item in objects):
            raise self._tapes.missing(where, name, "a bool")
        if all(item is None for item in objects):
            raise self._tapes.missing(where, name)
        self._tapes.guessed(where, name, f"this rank's own {', '.join(map(_in_words, objects[:3]))}")

    def _received(self, where: Where, num_objects: int) -> list[bytes] | None:
        received = self._tapes.receive_objects(where, num_objects)
        stand_in = _stand_in.get()
        return received if stand_in is None or stand_in.yields_to_tape else None


def _in_words(obj: object) -> str:
    """Call no custom ``__repr__``: it may read values."""
    if isinstance(obj, (str, bytes, int, float, type(None))):
        return reprlib.repr(obj)
    size = len(obj) if isinstance(obj, (list, tuple, dict, set)) else 1
    return f"{'' if size else 'empty '}{type(obj).__name__}"


def _dump(obj: object, weights_only: bool) -> bytes:
    file = io.BytesIO()
    if weights_only:
        torch.save(obj, file)
    else:
        c10d._pickler(file).dump(obj)
    return file.getvalue()


def _load(pickled: bytes, weights_only: bool) -> object:
    if weights_only:
        return torch.load(io.BytesIO(pickled), weights_only=True)
    return c10d._unpickler(io.BytesIO(pickled)).load()


def _fill(slots: list[object], objects: Sequence[bytes], weights_only: bool) -> None:
    """Raise IndexError for a list that is too short, as torch does."""
    for index, pickled in enumerate(objects):
        slots[index] = _load(pickled, weights_only)


def _group(group: dist.ProcessGroup | None) -> BareGroup:
    return cast(BareGroup, c10d._group_or_default_group(group))  # every group of this process is ours


def _group_rank(pg: BareGroup, rank: int | None, group_rank: int | None) -> int:
    return int(c10d._canonicalize_group_rank(pg, 0 if rank is None and group_rank is None else rank, group_rank))


def _check_inside(group: dist.ProcessGroup | None) -> None:
    if c10d._rank_not_in_group(group):
        raise ValueError("Invalid process group specified")


def _is_outside(group: dist.ProcessGroup | None, operation: str) -> bool:
    if not c10d._rank_not_in_group(group):
        return False
    c10d._warn_not_in_group(operation)
    return True
