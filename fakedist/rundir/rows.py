"""Rows of the journal's records. Each row of a record has the same named fields, for its writer and its reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from fakedist.rundir.schema import Int32


class Location(NamedTuple):
    """Where the rank is.

    Attributes:
        step: Step.
        phase: One of ``rundir.schema.PHASES``.
        layer: Number of the layer; 0 is outside of any module.
        recompute: Whether backward runs a forward again.
    """

    step: int
    phase: str
    layer: int
    recompute: bool


class LayerRow(NamedTuple):
    """A layer.

    Attributes:
        layer: Its number. Layer 0 is outside of any module.
        name: Fully qualified name, without wrappers.
        class_name: Class of the module.
        parent: Number of its parent; -1 for layer 0.
    """

    layer: int
    name: str
    class_name: str
    parent: int


class RouterPassRow(NamedTuple):
    """A call of a router, also one that a backward repeats: the number of the operation that picked, and then as
    ``router_load.RouterPass``.
    """

    op: int
    layer: int
    number: int
    step: int
    tokens: int
    num_experts: int
    top_k: int
    groups: int
    top_groups: int
    in_turn: bool = False


class OperationRow(NamedTuple):
    """A kind of operation: its number, and its name, e.g. aten.mm.default."""

    number: int
    name: str


class ScopeRow(NamedTuple):
    """A scope: the number of a location.

    Attributes:
        scope: Its number.
        step: Step.
        phase: Phase.
        layer: Layer.
        recompute: Whether backward runs a forward again.
    """

    scope: int
    step: int
    phase: str
    layer: int
    recompute: bool


_Located = TypeVar("_Located", Location, ScopeRow)


def merged(where: _Located, step: int) -> _Located:
    """A location or scope after steps later than this one turned out to belong to it.

    In step 0, what is outside of modules and of backward is ``init``, also what followed a forward.
    """
    if where.step <= step:
        return where
    is_init = not step and (where.phase == "other" or (where.phase == "forward" and not where.layer))
    return where._replace(step=step, phase="init" if is_init else where.phase)


class RegionRow(NamedTuple):
    """A range of operations that saved activations for a backward. ``last`` is below ``first`` if there was none.

    ``layer`` is the layer whose forward backward ran again; 0 for a plain forward.
    """

    first: int
    last: int
    layer: int


class CallTerms(NamedTuple):
    """Terms of a call on which its ranks have to agree, besides its operation and bytes; and where it was made.

    Attributes:
        reduction: SUM, AVG, ...; empty without one.
        root: Group rank that a broadcast, reduce, gather or scatter has as its root; -1 for other calls.
        tag: Of a send or receive.
        batch: Number of the coalesced calls on this group that it belongs to, from 1; 0 without them.
        sent_parts: Bytes for each rank of the group, where they are not equal.
        received_parts: Bytes from each rank of the group, where they are not equal.
        on_host: Whether its tensors are the host's.
        lines: Number of the script's lines that made it; -1 in autograd's own threads.
        parts: Dtype and bytes of each part of a call of several, on which all ranks have to agree.
        join: "inside" where ranks without inputs left make the call, too (Join); "joined" for the one in which they
            wait until no rank has any; else empty.
    """

    reduction: str = ""
    root: int = -1
    tag: int = 0
    batch: int = 0
    sent_parts: tuple[int, ...] = ()
    received_parts: tuple[int, ...] = ()
    on_host: bool = False
    lines: int = -1
    parts: tuple[str, ...] = ()
    join: str = ""


class CallWait(NamedTuple):
    """A wait for a call that was not done when it returned.

    Attributes:
        call: Number of the call.
        before: Number of the next call.
        stream: The stream that waits, which was current; the host itself for a call on the host.
    """

    call: int
    before: int
    stream: int


NO_TERMS = CallTerms()


class CallRow(NamedTuple):
    """A call on a process group.

    Attributes:
        sequence: Number of the call, from 0.
        operation: all_reduce, all_gather_into_tensor, ...
        group: Number of its group.
        bytes_in: Bytes that this rank sends.
        bytes_out: Bytes that this rank receives.
        dtype: Type of the first tensor; empty without tensors.
        asynchronous: Whether the call returns before it is done.
        stream: The stream that was current; 0 on the host.
        op: Number of the next operation.
        scope: Number of its scope.
        peer: The peer's group rank; -1 for collectives.
        largest_part_bytes: The largest part of an all_to_all that this rank sends to another rank, or receives from
            one; 0 for other calls.
        exchanged_bytes: What it sends to all other ranks or receives from them, whichever is more; 0 for other calls.
    """

    sequence: int
    operation: str
    group: int
    bytes_in: int
    bytes_out: int
    dtype: str
    asynchronous: bool
    stream: int
    op: int
    scope: int
    peer: int
    largest_part_bytes: int = 0
    exchanged_bytes: int = 0


class GroupRow(NamedTuple):
    """A process group.

    Attributes:
        number: Its number, in order of creation.
        name: Its name in torch.distributed.
        description: What the code that made it calls it.
        ranks: Global ranks in it; (start, stop) if ``ranks_step`` is not 0.
        ranks_step: The distance of many evenly spaced ranks; 0 if they are listed.
        group_rank: This rank's position in it.
        backend: The backend that the script asked for.
    """

    number: int
    name: str
    description: str
    ranks: tuple[int, ...]
    ranks_step: int
    group_rank: int
    backend: str

    @property
    def members(self) -> Sequence[int]:
        """Global ranks in the group."""
        return _members(self.ranks, self.ranks_step)


class OtherGroupRow(NamedTuple):
    """A process group that this rank made with others and is not in.

    Attributes:
        after: Groups of this rank that were made before it.
        description: As of :class:`GroupRow`.
        ranks: As of :class:`GroupRow`.
        ranks_step: As of :class:`GroupRow`.
    """

    after: int
    description: str
    ranks: tuple[int, ...]
    ranks_step: int

    @property
    def members(self) -> Sequence[int]:
        """Global ranks in the group."""
        return _members(self.ranks, self.ranks_step)


def _members(ranks: tuple[int, ...], step: int) -> Sequence[int]:
    return range(ranks[0], ranks[1], step) if step else ranks


class InventedRow(NamedTuple):
    """Made-up values that an operation gave a line of the script; the filename is empty in a backward."""

    operation: str
    filename: str
    line: int
    num_calls: int
    num_values: int


class UnansweredRow(NamedTuple):
    """A CUDA function that the virtual GPU refused.

    Attributes:
        function: Name.
        num_calls: Calls.
    """

    function: str
    num_calls: int


class DeviceUseRow(NamedTuple):
    """Memory of the rank's device in use after a change.

    Attributes:
        change: The change's number, from 1. It stands for all changes before the next row's.
        backed_bytes: This process's, behind the caching allocator's segments.
        outside_bytes: This process's, outside of the allocator.
        others_bytes: Of each other process.
    """

    change: int
    backed_bytes: int
    outside_bytes: int
    others_bytes: tuple[int, ...] = ()


class FrameRow(NamedTuple):
    """A Python frame.

    Attributes:
        filename: Source file.
        line: Line.
        function: Function.
    """

    filename: str
    line: Int32
    function: str


class LineRow(NamedTuple):
    """A line of a compiled graph's code, and the number of its module; -1 for the one that was compiled."""

    line: int
    module: int


class HolderRow(NamedTuple):
    """A change of what a block holds, in a compiled graph's code.

    Attributes:
        root: Line of the statement that allocated it; ``-1 - index`` for an input of the graph.
        line: From this line on, it belongs to the module.
        module: Number of the module; -1 for the one that was compiled.
    """

    root: int
    line: int
    module: int


class PlacingRow(NamedTuple):
    """The number of a list of layers, one for each module of a compiled graph, and last the layer that calls it."""

    number: int
    layers: tuple[int, ...]


class GraphRow(NamedTuple):
    """A call of a compiled graph among the operations, with the numbers of its code and of its list of layers."""

    op: int
    code: int
    placing: int


class HeldRow(NamedTuple):
    """An input of a compiled graph whose memory the graph uses again.

    Attributes:
        op: Number of the graph's call.
        address: Address of the input's storage.
        line: From this line of its code on, the memory belongs to the layer.
        layer: The layer.
    """

    op: int
    address: int
    line: int
    layer: int


class PoolRow(NamedTuple):
    """A segment of a private pool, such as a CUDA graph's, or pages mapped for one: its event's index, the id."""

    event: int
    first: int
    second: int


class MappingRow(NamedTuple):
    """A file in the process's memory.

    Attributes:
        address: Where it begins.
        size: Bytes of it that are mapped.
        path: Its path; those of deleted files end in " (deleted)".
        is_private: Whether a page that is written becomes the process's own.
    """

    address: int
    size: int
    path: str
    is_private: bool
