"""Install the built files as a user does, and see that they work: python tools/check_dist.py DIST SCRATCH.

- The wheel made from the sdist holds the same files as the wheel, and those for Linux hold the drivers besides.
- Without torch, the reading half works, and what needs torch says what to install.
- A vendor's build of torch, 2.10.0a0+..., is kept.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

#: A version as a vendor's build of torch has one: a pre-release with a local part. This one is made up.
VENDORS_TORCH = "2.10.0a0+0123abcd"


def main(dist: Path, scratch: Path) -> None:
    """Run every check; a failed one ends the process."""
    (everywhere,), (sdist,) = dist.glob("*-none-any.whl"), dist.glob("*.tar.gz")
    linux = sorted(dist.glob("*-manylinux_2_28_*.whl"))
    check(len(linux) == 2, f"wheels for Linux: {linux}")
    drivers = {f"fakedist/gpu/driver/prebuilt/{cuda}/libcuda.so.1" for cuda in ("12.8", "13.0", "13.2")}
    check(all(names(wheel) == names(everywhere) | drivers for wheel in linux), "the wheels for Linux have other files")
    wheel = next(path for path in linux if path.stem.endswith(platform.machine()))
    python = environment(scratch / "reader")
    run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(scratch / "again"), str(sdist))
    (again,) = (scratch / "again").glob("*.whl")
    check(names(everywhere) == names(again), "the sdist's wheel has other files")
    run(python, "-m", "pip", "install", "--quiet", str(wheel))
    fakedist = python.parent / "fakedist"
    run(fakedist, "--version")
    run(python, "-c", "import fakedist, sys; fakedist.open; assert 'torch' not in sys.modules")
    for command in ("report", "view", "compare", "time", "nsys", "calibrate", "export"):
        run(fakedist, command, "--help")
    refused = run(fakedist, "profile", "--world-size", "2", "--rank", "0", Path(__file__).resolve(), code=1)
    check("pip install 'fakedist[torch]'" in refused, f"profile without torch says: {refused}")
    python = environment(scratch / "container")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", str(made_up_torch(scratch)))
    planned = run(python, "-m", "pip", "install", "--dry-run", f"{wheel}[torch]")
    check("Would install" in planned and "torch-" not in planned, f"torch would be replaced: {planned}")
    sys.stdout.write(f"{wheel.name} and {sdist.name} install and work\n")


def environment(path: Path) -> Path:
    """Python of a new environment."""
    venv.create(path, with_pip=True, clear=True)
    return path / "bin/python"


def run(*command: object, code: int = 0) -> str:
    """Run a command that ends with an exit code, and return what it prints."""
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, check=False)  # not among the sources
    check(done.returncode == code, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def check(is_true: bool, message: str) -> None:
    """End the process with a message if it is not true."""
    if not is_true:
        sys.exit(f"check_dist: {message}")


def names(wheel: Path) -> set[str]:
    """The package's files in a wheel."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fakedist/")}


def made_up_torch(scratch: Path) -> Path:
    """An empty wheel with the version of a container's torch."""
    path = scratch / f"torch-{VENDORS_TORCH}-py3-none-any.whl"
    info = f"torch-{VENDORS_TORCH}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("torch/__init__.py", "")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {VENDORS_TORCH}\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: fakedist\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return path


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
