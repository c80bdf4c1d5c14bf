"""Recognises files of other programs by their content, and reads their values: JSON and pickles, compressed or not."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from fakedist.bounded import ForeignCodeError, UnreadableError, load_builtins, load_json, open_file
from fakedist.errors import ReportError, RunDirectoryError
from fakedist.units import format_bytes

FileKind = Literal["sqlite", "json", "other"]
Watch = Callable[[Callable[[], list[object]]], None]

_GZIP = b"\x1f\x8b"
_SQLITE = b"SQLite format 3\0"
_HEAD_BYTES = 1 << 16
#: The most that a file may have, unpacked. A step of a large model takes some 100 MB as a trace.
_MAX_BYTES = 2 << 30
#: The most that a byte of a compressed file may unpack to, and what any may. Traces of torch have 10 to 30.
_MAX_UNPACKED, _UNPACKED_AT_LEAST = 200, 16 << 20
_CHUNK_BYTES = 1 << 20
_UNPACK = "unpack it first"
EXPORT_HINT = "profiler.export_chrome_trace(FILE) writes one"
SNAPSHOT_HINT = "a snapshot is what torch.cuda.memory._dump_snapshot() writes"
DUMP_HINT = "TORCH_FR_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 make torch write one file a rank when it hangs"
#: How files begin that are not read, what they are, and what to do.
_OTHER_FILES = (
    (rb"\s*<(?:!doctype|!--|html|svg|\?xml)", "a page, which a browser opens", "give what the page was made from"),
    (rb"PK\x03\x04", "a zip archive, such as torch.save writes", _UNPACK),
    (rb"\x28\xb5\x2f\xfd|BZh|\xfd7zXZ", "compressed by another program than gzip", _UNPACK),
    (rb"\s*\[\s*\[", "a list of lists, such as export_memory_timeline writes", f"of the same profiler, {EXPORT_HINT}"),
)
#: A key of values that are something else than what was asked for, what they are, and what to do.
_OTHER_VALUES = {
    "entries": ("a dump of torch's Flight Recorder", "fakedist match DUMPS...   reads those of all ranks"),
    "segments": ("a memory snapshot", "fakedist report FILE   reads one"),
    "traceEvents": ("a trace of torch.profiler", "fakedist report FILE   reads one"),
    "allocated_bytes.all.current": ("what torch.cuda.memory_stats() returns, totals without blocks", SNAPSHOT_HINT),
    "nodes": ("an execution trace of torch, which has no kernels", EXPORT_HINT),
}
#: How snapshots begin as JSON, and pickles.
_SNAPSHOT = re.compile(
    rb'\s*(?:\{\s*"(?:segments|device_traces|allocator_settings|external_annotations|host_\w+)"'
    rb'|\[\s*\{\s*"(?:device|address|total_size|segment_type|allocated_size|active_size|blocks)")'
)
_PICKLE = (b"\x80", b"(", b"]", b"}")


def kind_of(path: Path) -> FileKind:
    """The format of a file by its beginning; "other" is a snapshot, or cannot be read, which its reader reports.

    Raises:
        ReportError: It is known to be something that is not read.
    """
    try:
        with open_file(path) as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, UnreadableError):
        return "other"
    if head.startswith(_SQLITE):
        return "sqlite"
    is_compressed = head.startswith(_GZIP)
    if is_compressed:
        with suppress(zlib.error):  # its reader reports it
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
        if head.startswith(_SQLITE):
            raise ReportError(f"{path} is a compressed SQLite file", _UNPACK)
    for begin, what, hint in _OTHER_FILES:
        if re.match(begin, head, re.IGNORECASE):
            raise ReportError(f"{path} is {what}", hint)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return "other" if _SNAPSHOT.match(head) else "json"
    return "json" if is_compressed and not head.startswith(_PICKLE) else "other"


def other_values(path: Path, values: object, wanted: str, part: str, hint: str) -> ReportError:
    """The error that the values of a file have no such part, and are perhaps something else that is known."""
    for key, (what, instead) in _OTHER_VALUES.items():
        if isinstance(values, dict) and key in values:
            return ReportError(f"{path} is not {wanted}: it is {what}", instead)
    return ReportError(f"{path} is not {wanted}: it has no {part}", hint)


def read_unpacked(path: Path, hint: str) -> tuple[bytes, bool]:
    """The content of a file, unpacked, and whether it is compressed and cut off.

    Raises:
        ReportError: It cannot be read, is damaged, or has more than any file may.
    """
    content, is_cut_off = [], False
    try:
        with open_file(path) as raw:
            is_compressed = raw.read(2) == _GZIP
            raw.seek(0)
            size = os.fstat(raw.fileno()).st_size
            most = min(_MAX_BYTES, max(_MAX_UNPACKED * size, _UNPACKED_AT_LEAST)) if is_compressed else _MAX_BYTES
            if is_compressed:
                size, is_cut_off = 0, True
                with gzip.open(raw) as file, suppress(EOFError):
                    while size <= most and (chunk := file.read1(_CHUNK_BYTES)):
                        content.append(chunk)
                        size += len(chunk)
                    is_cut_off = False
            elif size <= most:
                content.append(raw.read(most + 1))
                size = len(content[0])
    except (zlib.error, gzip.BadGzipFile) as error:
        raise ReportError(f"{path} is damaged or cut off: {error}", "export or copy it again") from error
    except (OSError, UnreadableError) as error:
        raise ReportError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", hint) from error
    if size > most:
        raise ReportError(f"{path} has more than {format_bytes(most)}, unpacked", "record less")
    return b"".join(content), is_cut_off


def read_values(path: Path, wanted: str, hint: str, watch: Watch | None = None) -> object:
    """The value of a file that is JSON or a pickle of numbers, texts, lists and dicts, compressed or not.

    ``watch`` is that of :func:`fakedist.bounded.load_builtins`.

    Raises:
        ReportError: It cannot be read, is neither, or tries to run code.
    """
    content, is_cut_off = read_unpacked(path, hint)
    if is_cut_off:
        raise ReportError(f"{path} is cut off: it is compressed, and its end is missing", "copy it again")
    try:
        if content.lstrip()[:1] in (b"{", b"["):
            return load_json(content)
        return load_builtins(content, watch)
    except ForeignCodeError as error:
        raise ReportError(f"{path} tries to run {error.name}, unlike {wanted}: nothing was run", hint) from None
    except UnreadableError as error:
        raise ReportError(f"{path} is not {wanted}: {error}", hint) from error


def read_snapshot(path: Path, watch: Watch | None = None) -> dict[str, object]:
    """Read a snapshot from any torch since 2.1: ``segments``, ``device_traces`` and whatever else it contains.

    ``watch`` is that of :func:`fakedist.bounded.load_builtins`.

    Raises:
        RunDirectoryError: The file cannot be read, is not a snapshot, or is a pickle that tries to run code.
    """
    wanted = "a memory snapshot"
    try:
        snapshot = read_values(path, wanted, SNAPSHOT_HINT, watch)
        if isinstance(snapshot, list):  # torch.cuda.memory.memory_snapshot(), which has no history
            snapshot = {"segments": snapshot}
        elif isinstance(snapshot, dict) and snapshot.get("device_traces") and snapshot.get("segments") is None:
            snapshot["segments"] = []
        if not isinstance(snapshot, dict) or not isinstance(snapshot.get("segments"), list):
            raise other_values(path, snapshot, wanted, "segments", SNAPSHOT_HINT)
    except ReportError as error:
        raise RunDirectoryError(error.message, error.hint) from error
    if not isinstance(snapshot.setdefault("device_traces", []), list):
        raise RunDirectoryError(f"{path} is not a memory snapshot: its device_traces are not a list", SNAPSHOT_HINT)
    return snapshot
