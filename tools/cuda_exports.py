"""Write tools/exports/CUDA.txt for each CUDA of torch's releases on PyPI: python -m tools.cuda_exports 2.10.0 2.15.0.

A file has the functions that a driver for that CUDA answers, which its libraries export in any of the releases, and the
packages with its headers. Downloads 2 to 3 GB for each CUDA, a package at a time, and keeps none.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from fakedist.gpu.driver.build import REFUSALS, is_harmless, is_interface
from fakedist.gpu.driver.elf import exported_names

EXPORTS = Path(__file__).parent / "exports"
#: The packages with the libraries, and among them those with the headers.
_PACKAGE = re.compile(
    r"nvidia-(cublas|cudnn|cufft|cufile|cusolver|cusparse|cusparselt|nccl|cuda-(cupti|nvrtc|runtime))(-cu\d+)?"
)
_HEADERS = re.compile(r"nvidia-cuda-(cupti|runtime)(-cu\d+)?==")
_LIBRARY = re.compile(r".*/lib/(lib(\w+)\.so\.\d+)")


def main(releases: list[str]) -> None:
    """Write the files of some releases of torch."""
    packages: dict[str, set[str]] = {}
    for release in releases:
        pins = pinned(release)
        (runtime,) = (pin.partition("==")[2] for pin in pins if "cuda-runtime" in pin)
        packages.setdefault(".".join(runtime.split(".")[:2]), set()).update(pins)
    for cuda, pins in packages.items():
        names: dict[str, set[str]] = {}
        for pin in sorted(pins):
            for library, exported in exports(pin):
                names.setdefault(library, set()).update(exported)
        lines = [f"# {' '.join(sorted(filter(_HEADERS.match, pins)))}"]
        for library in sorted(names):
            lines += [f"[{library}]", *sorted(names[library])]
        (EXPORTS / f"{cuda}.txt").write_text("\n".join(lines) + "\n")


def pinned(release: str) -> set[str]:
    """The packages that a release of torch requires, "nvidia-cublas==13.1.0.3", of those with libraries or headers."""
    options = ["--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, f"torch=={release}"]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    packages = (package["metadata"] for package in report["install"])
    return {f"{package['name']}=={package['version']}" for package in packages if _PACKAGE.fullmatch(package["name"])}


def exports(pin: str) -> Iterator[tuple[str, list[str]]]:
    """Each library of a package, by its file's name, and the functions that need an answer."""
    sys.stdout.write(f"{pin}\n")
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(downloaded(pin, Path(scratch))) as wheel:
        for path in wheel.namelist():
            if (match := _LIBRARY.fullmatch(path)) and match[2] in REFUSALS:
                names = exported_names(Path(wheel.extract(path, scratch)))
                yield match[1], [name for name in names if is_interface(name) and not is_harmless(name)]


def downloaded(pin: str, directory: Path) -> Path:
    """The wheel of a package."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), pin]
    subprocess.run(command, check=True)
    name, _, version = pin.partition("==")
    (wheel,) = directory.glob(f"{name.replace('-', '_')}-{version}-*.whl")
    return wheel


if __name__ == "__main__":
    main(sys.argv[1:])
