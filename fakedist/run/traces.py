"""The journal's record of what torch.profiler saw of the timed step: columns by table, times in nanoseconds."""

from __future__ import annotations

#: ``array``'s type codes. ``operations``: of torch, on the host; ``calls``: of CUDA; ``device``: what the GPU did.
#: ``operation`` is the id of the operation that was running, 0 if none was; texts are numbers of the record's texts.
#: ``flops`` are torch's own of a matrix product, by its shapes; 0 where it counts none.
COLUMNS = {
    "operations": {"id": "q", "start": "q", "end": "q", "thread": "q", "sequence": "q", "flops": "q", "text": "I"},
    "calls": {"correlation": "q", "start": "q", "operation": "q", "thread": "q"},
    "device": {"start": "q", "end": "q", "stream": "q", "correlation": "q", "operation": "q", "bytes": "q", "node": "q"}
    | {"text": "I", "grid": "I", "block": "I"},
}
