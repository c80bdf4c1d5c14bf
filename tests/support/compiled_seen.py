"""How Dynamo and AOTAutograd compile a program: graphs, operations, graph breaks, recompilations and warnings."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.utils


def _metrics() -> list[dict[str, object]]:
    """Each frame that Dynamo compiled, in order."""
    fields = ("co_name", "co_filename", "graph_op_count", "graph_node_count", "fail_type", "recompile_reason")
    found = []
    for metric in torch._dynamo.utils.get_compilation_metrics():
        kept = {field: getattr(metric, field, None) for field in fields}
        kept["co_filename"] = os.path.basename(str(kept["co_filename"]))
        kept["recompile_reason"] = str(kept["recompile_reason"]).partition("  #")[0].strip()
        kept["restarts"] = sorted(getattr(metric, "restart_reasons", None) or ())
        if kept["co_name"] is not None:  # tuning and a backward's compilation have entries too
            found.append(kept)
    return found


def _counters() -> dict[str, dict[str, int]]:
    kept = ("stats", "graph_break", "frames", "unimplemented", "compiled_autograd")
    found = {name: dict(torch._dynamo.utils.counters[name]) for name in kept}
    aot = torch._dynamo.utils.counters["aot_autograd"]
    found["aot_autograd"] = {name: aot[name] for name in ("total", "ok", "not_ok")}
    return found


class _Kept(logging.Handler):
    """Keeps the warnings that torch logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.texts.append(f"{record.name}: {record.getMessage()}")


@contextlib.contextmanager
def _warned(texts: list[str]) -> Iterator[None]:
    """Keep what Python and torch warn of. The filters stay as they are."""
    handler, show = _Kept(), warnings.showwarning

    def keep(message: Warning | str, category: type[Warning], *where: Any) -> None:
        texts.append(f"{category.__name__}: {message}")

    warnings.showwarning = keep
    logging.getLogger("torch").addHandler(handler)
    try:
        yield
    finally:
        warnings.showwarning = show
        logging.getLogger("torch").removeHandler(handler)
        texts += handler.texts


def _plain(text: str) -> str:
    """A text without what differs between two processes: addresses, places and numbers of objects."""
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    text = re.sub(r"/\S*/(?=\w+\.py)", "", text)
    text = re.sub(r"eval_with_key>\.\d+", "eval_with_key>", text)
    text = text.replace(", Fake", "")  # the dispatch key of a recorded thread, in guards
    return re.sub(r"\b\d{6,}\b", "N", text)


def observed(run: Callable[[], None]) -> dict[str, Any]:
    """Run a program, and return what was seen of it."""
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    torch._dynamo.utils.counters.clear()
    texts: list[str] = []
    ended = ""
    with _warned(texts):
        try:
            run()
        except Exception as error:  # whatever it is, it must be the same with and without fakedist
            ended = _plain(f"{type(error).__name__}: {error}")
            if "VERBOSE" in os.environ:
                traceback.print_exc()
    found = {"counters": _counters(), "compiled": _metrics(), "warned": sorted(texts), "ended": ended}
    plain: dict[str, Any] = json.loads(_plain(json.dumps(found, default=str)))
    return plain
