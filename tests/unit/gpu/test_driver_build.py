"""The driver's build: the torch that it is for, the functions that it answers, its errors, its cache."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from fakedist.errors import SetupError
from fakedist.gpu.driver import build
from fakedist.gpu.driver.build import answered_names, find_cuda, is_harmless
from fakedist.gpu.launch_log import Launch
from fakedist.gpu.native import find_c_compiler
from fakedist.gpu.virtual import _GpuCounters, _GpuModel


@pytest.mark.parametrize(
    "name",
    [
        *(f"cudnn{name}" for name in ("CreateTensorDescriptor", "SetTensorNdDescriptor", "GetFilterNdDescriptor")),
        *("cudnnSetConvolutionGroupCount", "cudnnSetSpatialTransformerNdDescriptor", "cudnnGetVersion"),
        *("cudnnGetProperty", "cudnnGetLastErrorString", "cublasGetStatusString"),
    ],
)
def test_what_needs_no_gpu_is_left_to_the_library(name: str) -> None:
    assert is_harmless(name)
    assert name not in answered_names(find_cuda().include)


@pytest.mark.parametrize(
    "name",
    [
        "cudnnSetDropoutDescriptor",  # fills states on the GPU
        "cudnnSetRNNDescriptor_v8",  # keeps a dropout descriptor, which is ours
        *("cudnnCreate", "cudnnBackendCreateDescriptor", "cudnnGetConvolutionForwardWorkspaceSize"),
        *("cudnnSetStream", "cublasSetStream_v2"),
    ],
)
def test_what_takes_a_handle_is_not(name: str) -> None:
    assert not is_harmless(name)


def test_a_descriptor_is_made_and_destroyed_by_the_same_side() -> None:
    answered = answered_names(find_cuda().include)
    made = {match[1] for name in answered if (match := re.fullmatch(r"cudnnCreate(\w*Descriptor)", name))}
    destroyed = {match[1] for name in answered if (match := re.fullmatch(r"cudnnDestroy(\w*Descriptor)", name))}
    assert made == destroyed == {f"{kind}Descriptor" for kind in ("CTCLoss", "Dropout", "RNN", "RNNData")}


def _copied_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str) -> None:
    """The driver consists of its headers and one source, ``broken.c``."""
    copied = tmp_path / "driver"
    shutil.copytree(build.SOURCE_DIRECTORY, copied, ignore=shutil.ignore_patterns("*.c", "*.py", "__pycache__"))
    (copied / "broken.c").write_text(broken)
    monkeypatch.setattr(build, "SOURCE_DIRECTORY", copied)
    monkeypatch.setattr(build, "generated_source", lambda cuda, exported: "")
    monkeypatch.setenv("FAKEDIST_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("int broken(void) { return mistaken; }", r"broken\.c:1:\d+: error: .mistaken. undeclared"),
        ("int broken(void) { return mistaken(); }", r"broken\.c:1:\d+: error: implicit declaration of .*mistaken"),
        ("int missing(void); int broken(void) { return missing(); }", r"undefined reference to .missing"),
    ],
)
def test_the_compilers_and_linkers_own_words_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, words: str
) -> None:
    _copied_sources(monkeypatch, tmp_path, source)
    with pytest.raises(SetupError, match=r"could not build the virtual GPU's driver \(exit status 1\)") as error:
        build.ensure_driver()
    assert re.search(words, error.value.message)
    assert "gcc" in error.value.hint
    left = [path.name for path in (tmp_path / "cache").iterdir()]
    assert left == ["build.lock"], "nothing but the lock is left in the cache"


@pytest.mark.parametrize("changed", ["memory.c", "virtual_gpu.h", "crt/host_defines.h", "nvml_names.txt"])
def test_every_source_and_header_has_a_driver_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: str
) -> None:
    """Checkouts of different versions share the cache: neither may run the other's driver."""
    before = build.driver_path()
    copied = tmp_path / "driver"
    shutil.copytree(build.SOURCE_DIRECTORY, copied)
    monkeypatch.setattr(build, "SOURCE_DIRECTORY", copied)
    assert build.driver_path() == before
    with (copied / changed).open("a") as file:
        file.write("/* changed */\n")
    assert build.driver_path() != before


@pytest.fixture
def prebuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package that holds a driver for the installed CUDA, on a machine without a compiler."""
    path = tmp_path / "prebuilt" / find_cuda().cuda_version / build.DRIVER_NAME
    path.parent.mkdir(parents=True)
    shutil.copyfile(build.ensure_driver(), path)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("FAKEDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return path


def test_a_prebuilt_driver_that_answers_every_export_needs_no_compiler(prebuilt: Path) -> None:
    driver = build.ensure_driver()
    assert driver.read_bytes() == prebuilt.read_bytes()
    assert (driver.parent / "libcuda.so").resolve() == driver
    behind = driver.parent / find_cuda().libraries["cublasLt"].name
    code = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1]); behind = ctypes.CDLL(sys.argv[2])\n"
        "print(behind.fakedist_configure is not None, behind.cublasLtGetVersion() > 0)"
    )
    command = [sys.executable, "-c", code, driver, behind]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True True\n"


def test_a_prebuilt_driver_that_lacks_an_export_is_not_taken(prebuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = build.installed_names(find_cuda())
    monkeypatch.setattr(build, "installed_names", lambda cuda: installed | {"nccl": ["ncclOfTomorrow"]})
    with pytest.raises(SetupError, match=r"no C compiler was found.*lacks functions of the installed libraries"):
        build.ensure_driver()


def test_without_a_compiler_an_error_names_the_cuda_of_the_prebuilt_drivers(
    prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuilt.parent.rename(prebuilt.parents[1] / "12.1")
    with pytest.raises(SetupError, match=r"\(this package has drivers for CUDA 12\.1, torch \S+ has CUDA") as error:
        build.ensure_driver()
    assert "apt-get install gcc" in error.value.hint


def test_the_lists_for_wheels_have_every_function_of_the_installed_libraries() -> None:
    """A wheel's driver is built from the lists: without a function it would be of no use to this torch."""
    cuda = find_cuda()
    listed = Path(__file__).parents[3] / "tools" / "exports" / f"{cuda.cuda_version}.txt"
    if not listed.exists():
        pytest.skip(f"no wheel has a driver for CUDA {cuda.cuda_version}")
    exported = {name for names in build.installed_names(cuda).values() for name in names}
    wanted = {name for name in exported if build.is_interface(name) and not is_harmless(name)}
    assert wanted - set(listed.read_text().split()) == set()


@pytest.mark.long
def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    """CUDA's functions alone have no prototypes: their callers declare them."""
    warnings = [f"-W{name}" for name in ("all", "extra", "shadow", "strict-prototypes", "missing-prototypes")]
    flags = [*build.FLAGS, *warnings, "-c", "-fno-diagnostics-show-caret", *build.include_flags(build.find_cuda())]
    command = [find_c_compiler(), *flags, *build.sources()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    found = [line for line in done.stderr.splitlines() if "warning:" in line or "error:" in line]
    known = answered_names(find_cuda().include)
    named = [(line, re.search(r"no previous prototype for .(\w+)", line)) for line in found]
    assert [line for line, function in named if not function or function[1] not in known] == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "mirror"),
    [("struct gpu_model", _GpuModel), ("struct gpu_counters", _GpuCounters), ("struct launch", Launch)],
)
def test_pythons_mirror_of_a_struct_has_its_fields(name: str, mirror: type[ctypes.Structure]) -> None:
    headers = "".join(path.read_text() for path in build.SOURCE_DIRECTORY.glob("*.h"))
    size = re.search(rf"_Static_assert\(sizeof\({name}\) == (\d+)", headers)
    assert size is not None
    assert ctypes.sizeof(mirror) == int(size[1])
    body = re.search(rf"^{name} \{{$(.*?)^\}};", headers, re.MULTILINE | re.DOTALL)
    assert body is not None
    declared = re.findall(r"(\w+)(?:\[\d+\])?[,;]", re.sub(r"/\*.*?\*/", "", body[1], flags=re.DOTALL))
    assert [field[0].removesuffix("_address") for field in mirror._fields_] == declared


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
    [("2.15.0+cu132", "13.2"), ("2.10.0a0+0123abcd", "13.0"), ("2.10.0.dev20251101+cu128", "12.8")],
)
def test_a_build_for_cuda_is_known_by_its_version_file(install: Install, version: str, cuda: str) -> None:
    install(version, cuda)
    assert build.torch_build() == (version, cuda)


@pytest.mark.parametrize("version", ["2.9.1+cu128", "1.13.1", "2.8.0a0+0123abcd"])
def test_a_release_that_is_too_old_is_told_with_the_line_to_type(install: Install, version: str) -> None:
    install(version, "12.8")
    with pytest.raises(SetupError, match=r"is too old: fakedist needs 2\.10 or newer") as caught:
        build.torch_build()
    assert caught.value.hint == "pip install 'torch>=2.10'"


def test_a_cpu_build_and_musl_are_refused_by_name(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("2.13.0+cpu", None)
    with pytest.raises(SetupError, match=r"torch 2\.13\.0\+cpu is a CPU build"):
        build.find_cuda()
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "x86_64-pc-linux-musl")
    with pytest.raises(SetupError, match=r"built for musl \(Alpine\)"):
        build.torch_build()
