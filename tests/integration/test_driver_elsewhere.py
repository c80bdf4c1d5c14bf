"""The driver's sources compile for other hosts and with another compiler. None of the results can run here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fakedist.gpu.driver import build

pytestmark = pytest.mark.long
#: e_machine of an ELF header (elf.h).
X86_64, AARCH64 = 62, 183


@pytest.mark.parametrize(("compiler", "machine"), [("aarch64-linux-gnu-gcc", AARCH64), ("clang", X86_64)])
def test_the_driver_is_built(tmp_path: Path, compiler: str, machine: int) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    cuda = build.find_cuda()
    generated, made = tmp_path / "generated.c", tmp_path / "libcuda.so.1"
    generated.write_text(build.generated_source(cuda, build.installed_names(cuda)))
    inputs = [*build.include_flags(cuda), *map(str, build.sources()), str(generated)]
    subprocess.run([compiler, *build.FLAGS, *inputs, *build.LINK_FLAGS, "-o", str(made)], check=True)
    header = made.read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == machine
