"""Build the virtual GPU's driver library once for the installed torch, into a cache.

It answers every function that the installed CUDA libraries export, so it is compiled on the user's machine against
torch's own headers and libraries, unless the package holds one for that CUDA that answers all of them. Standard library
only: the parent process never imports torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fakedist.errors import SetupError
from fakedist.gpu.driver.elf import exported_names, write_empty_library
from fakedist.gpu.native import build_directory, cache_directory, compile_native, find_c_compiler
from fakedist.torch_releases import OLDEST, release_of

SOURCE_DIRECTORY = Path(__file__).parent
#: Drivers that a wheel for Linux holds, each in a directory named for its CUDA version (tools/platform_wheel.py).
PREBUILT = SOURCE_DIRECTORY / "prebuilt"
#: The functions of nvml.h, of which no installed library has a list: those of nvidia-nvml-dev 13.5.37.
_NVML_NAMES = "nvml_names.txt"
#: Only the interface is exported: what the sources mark API. Assertions stay on, because a broken invariant would give
#: wrong numbers. Of the warnings only those are errors that are always mistakes: a newer compiler's other warnings must
#: not stop a user's run, and the tests hold the sources to all of them.
FLAGS = (
    *("-std=gnu11", "-O1", "-fPIC", "-fvisibility=hidden", "-pthread", "-UNDEBUG", "-Werror=int-conversion"),
    *("-Werror=implicit-function-declaration", "-Werror=incompatible-pointer-types"),
)
#: What the linker checks: that no source uses a function that none defines.
LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-ldl")
#: The library takes the name that c10, Triton and others dlopen, so that they find it instead of a real driver.
DRIVER_NAME = "libcuda.so.1"
#: What it is called in errors.
DRIVER = "the virtual GPU's driver"

#: The libraries that are stood in for, and the status that a refused call of each returns: its own "not supported".
REFUSALS = {"cudart": 801, "cublas": 15, "cublasLt": 15, "cudnn": 3000, "nvrtc": 11, "cufft": 16, "cusolver": 9} | {
    "cusparse": 10, "cusparseLt": 10, "nccl": 5, "cufile": 5001, "cupti": 27, "cuda": 801,
}  # fmt: skip
_PREFIXES = re.compile(r"_*(cu[A-Z]|cuda|cublas|cudnn|nvrtc|cufft|cusolver|cusparse|nccl|cupti)")
_TRACED = re.compile(r"^ *CUPTI_(RUNTIME|DRIVER)_TRACE_CBID_(\w+) *= (\d+)", re.MULTILINE)
# Texts and versions need no driver: the real libraries go on answering those.
_HARMLESS = re.compile(
    r"(Get(Error|Status)(String|Name)|GetVersion|GetCudartVersion|GetErrorString|GetLastErrorString"
    r"|nvrtcVersion|SupportedArchs|Logger|cu(solver|sparse|fft)GetProperty)"
)
# cuDNN's descriptors that hold numbers only, and what it knows of itself: no call of these takes a handle.
_CUDNN_WITHOUT_HANDLE = re.compile(
    r"cudnn(Create|Set|Get|Destroy)"
    r"(Tensor(Nd|4d)?|Filter(Nd|4d)?|Activation|Pooling(2d|Nd)?|Convolution(2d|Nd)?|SpatialTransformer(Nd)?)Descriptor(Ex)?"
    r"|cudnnSetConvolution(GroupCount|MathType|ReorderType)|cudnnGet(Property|MaxDeviceVersion)|cudnn[SG]etCallback"
)
_BLAS_MANAGEMENT = re.compile(
    r"cublas(Set|Get|Create|Destroy|Shutdown|Init|Alloc|Free|Logger|Xt|Xerbla|Migrate|Enable|Lt)"
)


@dataclass(frozen=True)
class CudaInstallation:
    """CUDA for the installed torch, of ``torch_version`` such as "2.15.0+cu132".

    ``cuda_version`` is empty for a CPU build; ``include`` has cuda_runtime_api.h, ``cupti_include`` cupti.h (CUDA 12's
    wheels have one for each library; None without CUPTI); ``libraries`` are those installed, by short name as in
    REFUSALS.
    """

    torch_version: str
    cuda_version: str
    include: Path
    cupti_include: Path | None
    libraries: dict[str, Path]


def torch_build() -> tuple[str, str]:
    """Torch's version and its CUDA version, read without an import. SetupError if missing, too old or unsupported."""
    if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or ""):
        raise SetupError(
            "this Python is built for musl (Alpine), for which PyTorch has no builds", "use a distribution with glibc"
        )
    text = (torch_directory() / "version.py").read_text()
    version = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", text)
    cuda = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    release = version.group(1) if version else "unknown"
    if release_of(release) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise SetupError(
            f"torch {release} is too old: fakedist needs {oldest} or newer", f"pip install 'torch>={oldest}'"
        )
    return release, cuda.group(1) if cuda else ""


def torch_directory() -> Path:
    """Directory of the installed torch, without importing it. SetupError if it is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise SetupError("torch is not installed in this Python", "pip install 'fakedist[torch]'")
    return Path(next(iter(spec.submodule_search_locations)))


def find_cuda() -> CudaInstallation:
    """Find the headers and libraries that came with the installed torch. SetupError without a CUDA build of it."""
    torch_version, cuda_version = torch_build()
    if not cuda_version:
        raise SetupError(
            f"torch {torch_version} is a CPU build; the virtual GPU runs PyTorch's CUDA side, so it needs a CUDA build",
            "pip install torch==2.15.0   (the PyPI file for Linux x86-64 is a CUDA build)",
        )
    roots = _search_roots(cuda_version.split(".")[0])
    include, cupti = (directory_of(header, roots) for header in ("cuda_runtime_api.h", "cupti.h"))
    libraries = {}
    for name in REFUSALS:
        paths = [path for root in roots for lib in ("lib", "lib64") for path in (root / lib).glob(f"lib{name}.so.*")]
        if paths:
            libraries[name] = sorted(paths, key=lambda path: len(path.name))[0]
    missing = [name for name in ("cudart", "cublas", "cublasLt") if name not in libraries]
    if include is None or missing:
        file = "cuda_runtime_api.h" if include is None else f"lib{missing[0]}.so"
        raise SetupError(
            f"the virtual GPU needs {file} of CUDA {cuda_version}, for torch {torch_version}; it is not installed",
            "pip install nvidia-cuda-runtime, or set CUDA_HOME to a CUDA toolkit of that version",
        )
    return CudaInstallation(torch_version, cuda_version, include, cupti, libraries)


def directory_of(header: str, roots: list[Path]) -> Path | None:
    """The first of the roots' include directories that has a header."""
    return next((root / "include" for root in roots if (root / "include" / header).exists()), None)


def _search_roots(cuda_major: str) -> list[Path]:
    """Directories with include/ and lib/, best first: the wheels' packages, then an installed toolkit."""
    roots = []
    spec = importlib.util.find_spec("nvidia")
    for location in spec.submodule_search_locations or [] if spec else []:
        nvidia = Path(location).resolve()  # environments that link to one installation share its driver
        others = (path for path in sorted(nvidia.glob("*")) if path.is_dir() and not re.fullmatch(r"cu\d+", path.name))
        roots += [nvidia / f"cu{cuda_major}", *others]  # pip leaves another torch's CUDA behind
    return [*roots, Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")]


def driver_path() -> Path:
    """Path of the driver, by a hash of all that it is built from. SetupError as :func:`find_cuda`."""
    cuda = find_cuda()
    digest = hashlib.sha256()
    others = sorted((*SOURCE_DIRECTORY.rglob("*.h"), *SOURCE_DIRECTORY.glob("*.py")))
    for part in (*sources(), *others, SOURCE_DIRECTORY / _NVML_NAMES):
        digest.update(part.name.encode() + part.read_bytes())
    digest.update(
        repr((cuda.torch_version, cuda.cuda_version, cuda.include, cuda.cupti_include, platform.machine())).encode()
    )
    for library in cuda.libraries.values():
        digest.update(f"{library} {library.stat().st_size}".encode())
    return cache_directory() / f"driver-{digest.hexdigest()[:16]}" / DRIVER_NAME


def ensure_driver() -> Path:
    """Put the driver into the cache unless it has it, next to :func:`further_libraries`; several processes may.

    SetupError without a CUDA build of torch, without a prebuilt driver and a compiler, or if that or the linker failed.
    """
    path = driver_path()
    if not path.exists():
        _build(find_cuda(), path)
    return path


def further_libraries(cuda: CudaInstallation) -> dict[str, Path | None]:
    """Empty libraries, which depend on the driver, for others to dlopen and look functions up in.

    With the installed library, it comes behind the driver: cuDNN asks cuBLASLt for functions that need no GPU too.
    """
    libraries: dict[str, Path | None] = {
        "libnvidia-ml.so.1": None,
        f"libcudart.so.{cuda.cuda_version.split('.')[0]}": None,
    }
    installed = cuda.libraries["cublasLt"]
    return libraries | {installed.name: installed}


def sources() -> list[Path]:
    """The driver's C sources, except the generated one."""
    return sorted(SOURCE_DIRECTORY.glob("*.c"))


def include_flags(cuda: CudaInstallation) -> list[str]:
    """Directories of headers. Ours have names of their own only in quotes: ``<cupti.h>`` is NVIDIA's."""
    directories = dict.fromkeys((cuda.include, cuda.cupti_include))
    return ["-iquote", str(SOURCE_DIRECTORY), *(f"-isystem{path}" for path in directories if path is not None)]


def prebuilt_driver(cuda: CudaInstallation) -> Path | None:
    """The package's own driver for a CUDA version; None unless it answers all that the installed libraries export."""
    path = PREBUILT / cuda.cuda_version / DRIVER_NAME
    if not path.exists():
        return None
    answered = set(exported_names(path))
    return path if all(name in answered for _, name in _names_to_answer(cuda, installed_names(cuda))) else None


def compile_driver(compiler: Sequence[str], cuda: CudaInstallation, exported: dict[str, list[str]], path: Path) -> None:
    """Compile the driver for libraries that export functions, by short name. SetupError if that failed."""
    generated = path.with_suffix(".c")
    generated.write_text(generated_source(cuda, exported))
    inputs = [*include_flags(cuda), *map(str, sources()), str(generated)]
    compile_native([*compiler, *FLAGS, *inputs, f"-Wl,-soname,{DRIVER_NAME}", *LINK_FLAGS, "-o", str(path)], DRIVER)
    generated.unlink()


def _build(cuda: CudaInstallation, path: Path) -> None:
    prebuilt = prebuilt_driver(cuda)
    compiler = "" if prebuilt else find_c_compiler(_why_compiled(cuda))
    with build_directory(path.parent.parent) as scratch:
        if path.exists():
            return
        made = scratch / "made"
        made.mkdir()
        driver = made / DRIVER_NAME
        if prebuilt:
            shutil.copyfile(prebuilt, driver)
        else:
            compile_driver([compiler], cuda, installed_names(cuda), driver)
        (made / "libcuda.so").symlink_to(DRIVER_NAME)  # Triton 3.4 links its launchers with -lcuda
        for name, installed in further_libraries(cuda).items():
            behind = [DRIVER_NAME] if installed is None else [DRIVER_NAME, str(installed)]
            write_empty_library(made / name, name, behind, like=driver)
        try:
            made.rename(path.parent)  # in one step: another process sees all of it or none
        except OSError:
            if not path.exists():  # else another process was faster
                raise


def _why_compiled(cuda: CudaInstallation) -> str:
    versions = sorted(path.parent.name for path in PREBUILT.glob(f"*/{DRIVER_NAME}"))
    if cuda.cuda_version in versions:
        return f"this package's driver for CUDA {cuda.cuda_version} lacks functions of the installed libraries"
    held = (
        f"this package has drivers for CUDA {', '.join(versions)}" if versions else "this package has no built driver"
    )
    return f"{held}, torch {cuda.torch_version} has CUDA {cuda.cuda_version}"


def installed_names(cuda: CudaInstallation) -> dict[str, list[str]]:
    """Functions that each installed library exports."""
    return {library: exported_names(path) for library, path in cuda.libraries.items()}


def _names_to_answer(cuda: CudaInstallation, exported: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Each function that the driver has instead of a library: the library's short name, and its own."""
    return [
        (library, name)
        for library, names in (exported | {"cuda": driver_api_names(cuda.include)}).items()
        for name in names
        if is_interface(name) and not is_harmless(name)
    ]


def driver_api_names(include: Path) -> list[str]:
    """Functions of the driver API: libcuda is not in any wheel, so they come from cuda.h, old names and versioned."""
    text = (include / "cuda.h").read_text(errors="replace")
    declared = set(re.findall(r"CUresult\s+CUDAAPI\s+(cu[A-Z]\w*)\s*\(", text))
    versioned = set(re.findall(r"#define\s+cu[A-Z]\w*\s+(cu[A-Z]\w*_v\d)\b", text))
    return sorted(declared | versioned | {"cuGetExportTable"})


def nvml_names() -> list[str]:
    """Functions of NVML, old names and versioned."""
    return (SOURCE_DIRECTORY / _NVML_NAMES).read_text().split()


def interface_versions(include: Path) -> list[tuple[str, int, int]]:
    """Driver functions whose interface changed: name, suffix (2 is ``_v2``), the first CUDA version that means it."""
    text = (include / "cudaTypedefs.h").read_text(errors="replace")
    versions: dict[str, set[int]] = {}
    for name, version in re.findall(r"\bPFN_(cu[A-Z]\w*?)_v(\d+)\)", text):
        versions.setdefault(name, set()).add(int(version))
    return [
        (name, suffix, version)
        for name, numbers in sorted(versions.items())
        for suffix, version in enumerate(sorted(numbers), start=1)
        if suffix > 1
    ]


def traced_functions(include: Path | None) -> list[tuple[str, str, bool, int]]:
    """Functions that CUPTI has a number for: name, CUPTI's name, whether it is the runtime's, the number.

    Where the runtime's interface has changed, its later form comes first. Empty if CUPTI is not installed.
    """
    functions: list[tuple[str, str, bool, int]] = []
    if include is None:
        return functions
    for header in ("cupti_runtime_cbid.h", "cupti_driver_cbid.h"):
        for library, full_name, number in _TRACED.findall((include / header).read_text(errors="replace")):
            if full_name not in ("INVALID", "SIZE", "FORCE_INT"):
                name = re.sub(r"_v\d{4,}$", "", full_name) if library == "RUNTIME" else full_name
                functions.append((name, full_name, library == "RUNTIME", int(number)))
    return functions[::-1]


def answered_names(include: Path) -> set[str]:
    """Functions that the C sources answer, by the names in CUDA's header (``cudaGetDeviceProperties_v2``)."""
    text = (include / "cuda_runtime_api.h").read_text(errors="replace")
    renamed = dict(re.findall(r"^ *# *define +(cuda[A-Z]\w*) +(cuda[A-Z]\w*_v\d) *$", text, re.MULTILINE))
    ours = re.compile(r"^(API|cudaError_t CUDARTAPI|CUresult CUDAAPI) [\w\s*]*?\b(\w+)\(", re.MULTILINE)
    definitions = [match for source in sources() for match in ours.findall(source.read_text())]
    return {renamed.get(name, name) if mark.startswith("cudaError_t") else name for mark, name in definitions}


def is_blas_routine(name: str) -> bool:
    """Return whether a cuBLAS function is a routine on device memory, as opposed to the management of handles."""
    return re.match(r"cublas(I?[a-z]*[A-Z])", name) is not None and not _BLAS_MANAGEMENT.match(name)


def is_harmless(name: str) -> bool:
    """Return whether the installed library may answer itself, needing no GPU. CUPTI looks for one."""
    if name.startswith("cupti"):
        return False
    return _HARMLESS.search(name) is not None or _CUDNN_WITHOUT_HANDLE.fullmatch(name) is not None


def is_interface(name: str) -> bool:
    """Return whether an exported name belongs to a CUDA library's interface; some export internals, too."""
    return _PREFIXES.match(name) is not None


def generated_source(cuda: CudaInstallation, exported: dict[str, list[str]]) -> str:
    """C source of everything the hand-written sources do not answer: routines counted, all else refused by name.

    NVML's functions are not supported without a word, as on many a GPU: monitors try all of them.
    """
    answered = answered_names(cuda.include)
    cudnn = cuda.libraries["cudnn"].name if "cudnn" in cuda.libraries else ""
    headers = ("blas.h", "cudnn.h", "cupti.h", "entry_points.h", "nvml.h", "refuse.h")
    lines = [*(f'#include "{header}"' for header in headers), "const struct interface_version interface_versions[] = {"]
    lines += [f'    {{"{name}", {suffix}, {since}}},' for name, suffix, since in interface_versions(cuda.include)]
    lines += ["    {0, 0, 0},", "};", f"const char cudnn_library[] = {json.dumps(cudnn)};"]  # quoted as in C
    lines += ["const struct traced_function traced_functions[] = {"]
    lines += [
        f'    {{"{name}", "{full_name}", {int(is_runtime)}, {number}}},'
        for name, full_name, is_runtime, number in traced_functions(cuda.cupti_include)
    ]
    lines += ["    {0, 0, 0, 0},", "};"]
    for library, name in _names_to_answer(cuda, exported):
        if name in answered:
            continue
        answered.add(name)
        if library == "cublas" and is_blas_routine(name) and f"{name}_v2" not in exported[library]:
            lines.append(f'API int {name}(void *handle) {{ return blas_launch(handle, "{name}"); }}')
        else:
            lines.append(f'API int {name}(void) {{ return refuse_call("{name}", {REFUSALS[library]}); }}')
    others = (name for name in nvml_names() if name not in answered)
    lines += [f"API int {name}(void) {{ return NVML_NOT_SUPPORTED; }}" for name in others]
    return "\n".join(lines) + "\n"
