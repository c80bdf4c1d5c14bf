"""The journal's record of what torch.profiler saw of the timed step: columns by table, times in nanoseconds."""

from __future__ import annotations

#: ``array`` type codes. ``operations``: torch operations on the host; ``calls``: CUDA calls; ``device``: GPU activity.
#: ``operation`` is the id of the operation that was running, or 0. Texts are indices into the record's texts.
#: ``flops`` is torch's own count for a matrix product, from its shapes; 0 where torch counts none.
COLUMNS = {
    "operations": {"id": "q", "start": "q", "end": "q", "thread": "q", "sequence": "q", "flops": "q", "text": "I"},
    "calls": {"correlation": "q", "start": "q", "operation": "q", "thread": "q"},
    "device": {"start": "q", "end": "q", "stream": "q", "correlation": "q", "operation": "q", "bytes": "q", "node": "q"}
    | {"text": "I", "grid": "I", "block": "I"},
}
