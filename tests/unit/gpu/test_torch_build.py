"""Facts read from the installed torch before it is imported."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from fakedist.errors import SetupError
from fakedist.gpu.driver import build

Install = Callable[[str, str | None], None]
VERSION_FILE = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = '{version}'
cuda: Optional[str] = {cuda!r}
hip: Optional[str] = None
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    def write(version: str, cuda: str | None) -> None:
        (tmp_path / "version.py").write_text(VERSION_FILE.format(version=version, cuda=cuda))
        spec = importlib.machinery.ModuleSpec("torch", None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path)]
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    return write


@pytest.mark.parametrize(
    ("version", "cuda"),
    [("2.15.0+cu132", "13.2"), ("2.8.0a0+5228986c39.nv25.05", "12.9"), ("2.10.0.dev20251101+cu128", "12.8")],
)
def test_a_build_for_cuda_is_known_by_its_version_file(install: Install, version: str, cuda: str) -> None:
    install(version, cuda)
    assert build.torch_build() == (version, cuda)


@pytest.mark.parametrize("version", ["2.7.1+cu128", "1.13.1", "2.7.0a0+ecf3bae40a.nv25.02"])
def test_a_release_that_is_too_old_is_told_with_the_line_to_type(install: Install, version: str) -> None:
    install(version, "12.8")
    with pytest.raises(SetupError, match=r"is too old: fakedist needs 2\.8 or newer") as caught:
        build.torch_build()
    assert caught.value.hint == "pip install 'torch>=2.8'"


def test_musl_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.sysconfig, "get_config_var", lambda name: "x86_64-pc-linux-musl")
    with pytest.raises(SetupError, match=r"built for musl \(Alpine\)"):
        build.torch_build()


def test_a_cpu_build_is_refused_before_anything_is_built(install: Install) -> None:
    install("2.13.0+cpu", None)
    with pytest.raises(SetupError, match=r"torch 2\.13\.0\+cpu is a CPU build"):
        build.find_cuda()
