"""Names that both halves know: code that does not belong to the script, and operations of made-up values."""

from __future__ import annotations

import re

#: A file that Inductor generated for a compiled graph: "c" and 51 base-32 digits of a SHA-256.
INDUCTOR_FILE = re.compile(r"\bc[a-z2-7]{51}\.py\b")

#: The operation of made-up times between two events, in the table ``invented``.
EVENT_TIME = "cuda.Event.elapsed_time"

#: The operation of a row without values: at its line, a router picked experts by made-up values.
ROUTED = "router"
#: Files whose functions stand between the script and a deprecated function of torch. The line is their caller's.
WRAPPERS = ("/typing_extensions.py", "/warnings.py", "/_py_warnings.py")

#: Methods by which tensor subclasses pass an operation on. Its line is their caller's.
PASSES_ON = frozenset({"__torch_function__", "__torch_dispatch__"})
