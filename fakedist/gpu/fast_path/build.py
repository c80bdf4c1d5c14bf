"""Build libraries against the installed torch, into the cache. Standard library only: the parent calls it."""

from __future__ import annotations

import hashlib
import platform
import sys
from pathlib import Path
from typing import NamedTuple

from fakedist.errors import SetupError
from fakedist.gpu.driver import build as driver
from fakedist.gpu.native import build_directory, cache_directory, compile_native, find_cpp_compiler

_DIRECTORY = Path(__file__).parent
_FLAGS = ("-fPIC", "-shared", "-fvisibility=hidden")


class Library(NamedTuple):
    """A library linked with ``links`` of torch's libraries. ``use`` and ``product`` are for errors.

    Its sources are in this directory, or named by their full paths.
    A failed build of one that ``is_optional`` is remembered: trying takes seconds in each run.
    """

    name: str
    sources: tuple[str, ...]
    headers: tuple[str, ...]
    flags: tuple[str, ...]
    links: tuple[str, ...]
    use: str
    product: str
    is_optional: bool = False

    def path(self) -> Path:
        """Path of the library, built or not, by a digest of its sources and torch. SetupError without CUDA in torch."""
        cuda = driver.find_cuda()
        digest = hashlib.sha256()
        for part in (*self.sources, *self.headers, Path(__file__).name):
            digest.update((_DIRECTORY / part).read_bytes())
        digest.update(repr((cuda.torch_version, cuda.include, driver.torch_directory(), platform.machine())).encode())
        return cache_directory() / f"{self.name}-{digest.hexdigest()[:16]}.so"

    def ensure(self) -> Path:
        """Build the library if it is not in the cache, which is said on stderr: it takes up to half a minute.

        SetupError if that fails.
        """
        path = self.path()
        if path.exists():
            return path
        failed = path.with_suffix(".failed")
        compiler = find_cpp_compiler(self.use)
        if self.is_optional and failed.exists() and failed.read_text().startswith(f"{compiler}\n"):
            raise SetupError(failed.read_text().partition("\n")[2], f"rm {failed} tries again")
        torch = driver.torch_directory()
        # torch's header includes CUDA's, which include a header that the wheels leave out: the driver has it.
        include = [f"-I{_DIRECTORY / 'include'}", f"-I{torch / 'include'}", f"-isystem{driver.find_cuda().include}"]
        include += ["-idirafter", str(driver.SOURCE_DIRECTORY)]
        *included, last = (str(_DIRECTORY / name) for name in self.sources)
        sources = [*(word for source in included for word in ("-include", source)), last]  # reads torch's headers once
        with build_directory(path.parent) as scratch:
            if path.exists():
                return path
            made = scratch / path.name
            sys.stderr.write(f"fakedist: compiling {self.product}, once for this torch: up to half a minute\n")
            sys.stderr.flush()
            command = [compiler, *self.flags, *_FLAGS, *include, *sources, "-o", str(made), f"-L{torch / 'lib'}"]
            try:
                compile_native([*command, *self.links], self.product)
            except SetupError as error:
                if self.is_optional:
                    failed.write_text(f"{compiler}\n{error.message}")
                raise
            made.replace(path)  # in one step: another process sees all of it or none
        return path


FAST_PATH = Library(
    "fast-path",
    ("history.cpp", "host.cpp", "marks.cpp", "nodes.cpp", "objects.cpp", "trace.cpp", "fast_path.cpp"),
    ("nodes.h", "trace.h", "view.h"),
    ("-std=c++20", "-O2"),
    ("-lc10_cuda", "-lc10", "-ltorch_cpu"),
    "it builds what makes recorded steps fast",
    "the fast path of recorded operations",
    is_optional=True,
)
