"""Build the tracker once for the installed torch, into the cache. Standard library only: the parent calls this, too."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from fakedist.gpu.driver import build as driver
from fakedist.gpu.native import build_directory, cache_directory, compile_native, find_cpp_compiler

_DIRECTORY = Path(__file__).parent
_SOURCE = _DIRECTORY / "tracker.cpp"
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden")


def ensure_tracker() -> Path:
    """Path of the tracker's library. Builds it first if it is not in the cache.

    Raises:
        SetupError: No CUDA build of torch, no C++ compiler, or the compiler failed.
    """
    cuda = driver.find_cuda()
    torch = driver.torch_directory()
    digest = hashlib.sha256()
    for part in (_SOURCE, *sorted(_DIRECTORY.rglob("*.h")), Path(__file__)):
        digest.update(part.read_bytes())
    digest.update(repr((cuda.torch_version, cuda.include, torch, platform.machine())).encode())
    path = cache_directory() / f"tracker-{digest.hexdigest()[:16]}.so"
    if path.exists():
        return path
    # torch's header includes CUDA's, which include a header that the wheels leave out: the driver has it.
    include = [f"-I{_DIRECTORY / 'include'}", f"-I{torch / 'include'}", f"-isystem{cuda.include}"]
    include += ["-idirafter", str(driver.SOURCE_DIRECTORY)]
    libraries = [f"-L{torch / 'lib'}", "-lc10_cuda", "-lc10"]
    with build_directory(path.parent) as scratch:
        if path.exists():
            return path
        made = scratch / path.name
        compiler = find_cpp_compiler("torch 2.8 and 2.9 need one, to count the events of their allocator")
        command = [compiler, *_FLAGS, *include, str(_SOURCE), "-o", str(made), *libraries]
        compile_native(command, "the tracker of allocator events that torch 2.8 and 2.9 need")
        made.replace(path)  # in one step: another process sees all of it or none
    return path
