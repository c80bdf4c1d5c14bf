"""Which collective a call is, and how large its whole buffer is."""

from __future__ import annotations

#: The beginning of a call's operation -> the collective that it is, and the side whose bytes are the whole buffer.
#: The first match counts.
_KINDS = (
    ("reduce_scatter", "reduce_scatter", "bytes_in"),
    ("all_gather", "all_gather", "bytes_out"),
    ("allgather", "all_gather", "bytes_out"),
    ("all_reduce", "all_reduce", "bytes_in"),
    ("allreduce", "all_reduce", "bytes_in"),
    ("all_to_all", "all_to_all", "largest"),
    ("alltoall", "all_to_all", "largest"),
    ("broadcast", "broadcast", "largest"),
    ("reduce", "reduce", "largest"),
    ("gather", "gather", "largest"),
    ("scatter", "scatter", "largest"),
    ("send", "send", "largest"),
    ("recv", "send", "largest"),
    ("barrier", "barrier", "largest"),
    ("monitored_barrier", "barrier", "largest"),
)


def collective_of(operation: str, bytes_in: int, bytes_out: int) -> tuple[str, int]:
    """The collective that a call is, and the bytes of its whole buffer; "" for an operation that is not known.

    Args:
        operation: The call's operation, e.g. all_gather_into_tensor_coalesced.
        bytes_in: Bytes of this rank's inputs.
        bytes_out: Bytes of this rank's outputs.
    """
    sizes = {"bytes_in": bytes_in, "bytes_out": bytes_out, "largest": max(bytes_in, bytes_out)}
    return next(
        ((kind, sizes[side]) for prefix, kind, side in _KINDS if operation.startswith(prefix)),
        ("", sizes["largest"]),
    )
