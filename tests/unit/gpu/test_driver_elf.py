"""Shared libraries are read and written without a compiler."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from fakedist.gpu.driver.build import ensure_driver, find_cuda
from fakedist.gpu.driver.elf import exported_names, write_empty_library


@pytest.mark.parametrize("name", ["cudart", "cublas", "cudnn", "cusparseLt"])
def test_the_functions_of_a_library_are_those_that_nm_lists(name: str) -> None:
    library = find_cuda().libraries[name]
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    symbols = (line.split() for line in listed.splitlines())
    expected = {words[2].partition("@")[0] for words in symbols if len(words) == 3 and words[1] in "TW"}
    assert exported_names(library) == sorted(expected)


def test_an_empty_library_lends_the_functions_of_those_that_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "anything.so"
    write_empty_library(path, "libnothing.so.1", ["libm.so.6"], like=ensure_driver())
    assert exported_names(path) == []
    library = ctypes.CDLL(str(path))
    library.cbrt.restype = ctypes.c_double
    assert library.cbrt(ctypes.c_double(27)) == pytest.approx(3)
    with pytest.raises(AttributeError):
        _ = library.sqlite3_open
    described = subprocess.run(["readelf", "-dlW", path], capture_output=True, text=True, check=True).stdout
    assert "Library soname: [libnothing.so.1]" in described
    assert "Shared library: [libm.so.6]" in described
    assert not [line for line in described.splitlines() if "GNU_STACK" in line and " RWE " in line]
