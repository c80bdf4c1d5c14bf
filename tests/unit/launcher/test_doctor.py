from __future__ import annotations

from pathlib import Path

import pytest

from fakedist.cli import main
from fakedist.errors import SetupError
from fakedist.gpu.fast_path.build import Library
from fakedist.launcher import doctor


def _missing() -> Path:
    raise SetupError("it is not there", "install it")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine with a CUDA build of torch, no GPU, and the driver in the cache."""
    (tmp_path / "driver.so").touch()
    monkeypatch.setattr(doctor, "torch_build", lambda: ("2.15.0+cu132", "13.2"))
    monkeypatch.setattr(doctor, "count_real_gpus", lambda: 0)
    monkeypatch.setattr(doctor, "find_c_compiler", lambda: "/usr/bin/gcc")
    monkeypatch.setattr(doctor, "driver_path", lambda: tmp_path / "driver.so")
    monkeypatch.setattr(Library, "ensure", lambda library: tmp_path / "fast-path.so")
    return monkeypatch


def _states() -> dict[str, str]:
    return {finding.name: finding.state for finding in doctor.diagnose().findings}


def test_the_virtual_gpu_works_without_a_real_one_and_both_with_one(machine: pytest.MonkeyPatch) -> None:
    assert doctor.diagnose().devices == ("virtual",)
    assert _states()["real GPU"] == "optional"
    machine.setattr(doctor, "count_real_gpus", lambda: 2)
    assert doctor.diagnose().devices == ("cuda", "virtual")


def test_a_cpu_build_of_torch_is_named_with_what_to_install(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(doctor, "torch_build", lambda: ("2.13.0+cpu", ""))
    finding = doctor.check_torch()
    assert (finding.state, finding.text) == ("missing", "2.13.0+cpu is a CPU build")
    assert finding.hint.startswith("pip install torch==")


def test_a_driver_in_the_cache_needs_no_compiler_and_a_fast_path_is_not_needed(machine: pytest.MonkeyPatch) -> None:
    assert _states()["fast path"] == "ok"
    machine.setattr(doctor, "find_c_compiler", _missing)
    machine.setattr(Library, "ensure", lambda library: _missing())
    assert (_states()["C compiler"], _states()["fast path"]) == ("optional", "optional")
    assert doctor.diagnose().devices == ("virtual",)
    machine.setattr(doctor, "driver_path", _missing)
    assert _states()["C compiler"] == "missing"
    assert doctor.diagnose().devices == ()
    assert all(finding.hint for finding in doctor.diagnose().findings if finding.state == "missing")


def test_a_driver_that_is_not_built_yet_is_built(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "new.so"

    def build() -> Path:
        path.touch()
        return path

    machine.setattr(doctor, "driver_path", lambda: path)
    machine.setattr(doctor, "ensure_driver", build)
    assert doctor.check_driver().text.startswith("built now in ")
    assert path.exists()


def test_nsys_is_looked_for_where_a_run_looks_for_it(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setattr(doctor, "find_nsys", _missing)
    missing = doctor.check_nsys()
    assert (missing.state, missing.hint) == ("optional", "install it")
    assert "--nsys needs it" in missing.text
    machine.setattr(doctor, "find_nsys", lambda: tmp_path / "nsys")
    assert doctor.check_nsys().text.startswith(f"{tmp_path / 'nsys'}: ")


def test_without_torch_it_says_what_works_all_the_same(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.setattr(doctor, "torch_build", _missing)
    machine.setattr(doctor, "check_driver", lambda: doctor.MachineCheck("virtual GPU", "missing", "no torch"))
    assert main(["doctor"]) == 1
    *_, works, lacks = capsys.readouterr().out.splitlines()
    assert works.startswith("report, view, compare, time, nsys, calibrate and export work here")
    assert lacks.startswith("profile and check do not yet")
