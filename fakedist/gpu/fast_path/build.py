"""Build the fast path for the installed torch, into the cache. Standard library only: the parent calls it, too."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from fakedist.errors import SetupError
from fakedist.gpu.driver import build as driver
from fakedist.gpu.native import build_directory, cache_directory, compile_native, find_cpp_compiler
from fakedist.torch_releases import ALLOCATOR_METADATA

_NAMES = ("fast_path.cpp", "history.cpp", "marks.cpp", "objects.cpp", "trace.cpp")
_SOURCES = tuple(map(Path(__file__).with_name, _NAMES))
_HEADERS = tuple(map(Path(__file__).with_name, ("trace.h", "view.h")))
#: Where torch's headers find the one of CUDA's that its wheels leave out.
_TRACKER = Path(__file__).parents[1] / "tracker"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")


def library_path() -> Path:
    """Where the library is or will be. Its name has what it depends on.

    Raises:
        SetupError: No CUDA build of torch.
    """
    cuda = driver.find_cuda()
    digest = hashlib.sha256()
    for part in (*_SOURCES, *_HEADERS, Path(__file__)):
        digest.update(part.read_bytes())
    digest.update(repr((cuda.torch_version, cuda.include, driver.torch_directory(), platform.machine())).encode())
    return cache_directory() / f"fast-path-{digest.hexdigest()[:16]}.so"


def ensure_fast_path() -> Path:
    """Path of the library. Builds it first if it is not in the cache. That takes twenty seconds.

    Raises:
        SetupError: No CUDA build of torch, or too old a one, no C++ compiler, or it failed, now or before.
    """
    if ALLOCATOR_METADATA.is_missing():
        raise SetupError("it needs torch 2.10 or newer", "pip install torch==2.15.0")
    path = library_path()
    if path.exists():
        return path
    failed = path.with_suffix(".failed")
    compiler = find_cpp_compiler("it builds what makes recorded steps fast")
    if failed.exists() and failed.read_text().startswith(f"{compiler}\n"):
        raise SetupError(failed.read_text().partition("\n")[2], f"rm {failed} tries again")
    torch = driver.torch_directory()
    include = [f"-I{_TRACKER / 'include'}", f"-I{torch / 'include'}", f"-isystem{driver.find_cuda().include}"]
    include += ["-idirafter", str(driver.SOURCE_DIRECTORY)]
    libraries = [f"-L{torch / 'lib'}", "-lc10_cuda", "-lc10", "-ltorch_cpu"]
    with build_directory(path.parent) as scratch:
        if path.exists():
            return path
        made = scratch / path.name
        command = [compiler, *_FLAGS, *include, *map(str, _SOURCES), "-o", str(made), *libraries]
        try:
            compile_native(command, "the fast path of recorded operations")
        except SetupError as error:
            failed.write_text(f"{compiler}\n{error.message}")  # trying takes seconds, and runs go without it
            raise
        made.replace(path)  # in one step: another process sees all of it or none
    return path
