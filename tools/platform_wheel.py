"""Make wheels for Linux of the one that runs everywhere: python -m tools.platform_wheel DIST SCRATCH.

They also hold the virtual GPU's driver, once for each CUDA of tools/exports, compiled by zig for glibc 2.28, which
torch's own wheels need too. With such a wheel, a machine needs no compiler.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from fakedist.gpu.driver.build import (
    DRIVER_NAME,
    PREBUILT,
    SOURCE_DIRECTORY,
    CudaInstallation,
    compile_driver,
    directory_of,
)
from tools.cuda_exports import EXPORTS, downloaded

ROOT = Path(__file__).parents[1]
#: zig's flags for each kind of machine.
MACHINES = {"x86_64": ("-mcpu=x86_64",), "aarch64": ()}
_FLAGS = ("-fno-sanitize=undefined", f"-fmacro-prefix-map={SOURCE_DIRECTORY}=driver", "-s")


def main(dist: Path, scratch: Path) -> None:
    """Build every driver, and write the wheels next to the one in ``dist``."""
    (wheel,) = dist.glob("*-none-any.whl")
    drivers: dict[str, dict[str, Path]] = {machine: {} for machine in MACHINES}
    for listed in sorted(EXPORTS.glob("*.txt")):
        cuda, functions = described(listed, scratch / listed.stem)
        for machine, flags in MACHINES.items():
            drivers[machine][listed.stem] = driver = scratch / listed.stem / machine / DRIVER_NAME
            driver.parent.mkdir()
            compiler = (sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.2.28")
            compile_driver((*compiler, *flags, *_FLAGS), cuda, functions, driver)
            sys.stdout.write(f"{driver}: {driver.stat().st_size:,} bytes\n")
    for machine in MACHINES:
        made = with_drivers(wheel, drivers[machine], f"manylinux_2_28_{machine}")
        shown = [sys.executable, "-m", "auditwheel", "show", str(made)]
        words = " ".join(subprocess.run(shown, check=True, stdout=subprocess.PIPE, text=True).stdout.split())
        sys.stdout.write(f"{words}\n")
        tag = re.search(rf'platform tag: "manylinux_2_(\d+)_{machine}"', words)
        if tag is None or int(tag[1]) > 28:
            sys.exit(f"platform_wheel: auditwheel does not find {made} to be for glibc 2.28")


def described(listed: Path, directory: Path) -> tuple[CudaInstallation, dict[str, list[str]]]:
    """CUDA as a file of tools/exports has it, with headers from PyPI, and the functions of its libraries."""
    directory.mkdir(parents=True)
    first, *parts = listed.read_text().split("[")
    for pin in first.split()[1:]:
        with zipfile.ZipFile(downloaded(pin, directory)) as package:
            package.extractall(directory)
    roots = sorted(path.parent for path in directory.glob("nvidia/*/include"))
    include, cupti = (directory_of(header, roots) for header in ("cuda_runtime_api.h", "cupti.h"))
    if include is None or cupti is None:
        sys.exit(f"platform_wheel: {first.strip('# ')} have no cuda_runtime_api.h or no cupti.h")
    libraries, functions = {}, {}
    for file, *names in (part.replace("]", "").split() for part in parts):
        library = file.removeprefix("lib").partition(".")[0]
        libraries[library], functions[library] = Path(file), names
    return CudaInstallation("", listed.stem, include, cupti, libraries), functions


def with_drivers(wheel: Path, drivers: dict[str, Path], platform: str) -> Path:
    """Write a wheel's copy for a platform, with drivers by CUDA version, next to it."""
    made = wheel.with_name(wheel.name.replace("none-any", f"none-{platform}"))
    with zipfile.ZipFile(wheel) as source:
        contents = {name: source.read(name) for name in source.namelist()}
    (facts,) = (name for name in contents if name.endswith(".dist-info/WHEEL"))
    text = contents[facts].replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")
    contents[facts] = text.replace(b"Tag: py3-none-any", f"Tag: py3-none-{platform}".encode())
    directory = PREBUILT.relative_to(ROOT).as_posix()
    contents |= {f"{directory}/{cuda}/{DRIVER_NAME}": driver.read_bytes() for cuda, driver in drivers.items()}
    record = facts.replace("/WHEEL", "/RECORD")
    del contents[record]
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in contents.items()]
    contents[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in contents.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(info, content)
    return made


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
