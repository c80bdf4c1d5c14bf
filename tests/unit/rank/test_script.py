from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from fakedist.errors import JobError
from fakedist.launcher.checked_script import ScriptSyntaxError, check_script
from fakedist.options import Job

SHOWS_ITSELF = """
import os, pickle, sys
class Mine: pass
kinds = {key: type(value).__name__ for key, value in globals().items() if key.startswith("__")}
print(sys.argv, sys.path[0], os.getcwd(), __name__, __package__, globals().get("__file__"), sorted(kinds.items()))
print(sys.modules["__main__"].__dict__ is globals(), sys.flags.safe_path)
print(type(pickle.loads(pickle.dumps(Mine()))) is Mine)
def fail(): raise ValueError("shown")
if "fail" in sys.argv: fail()
if "exit" in sys.argv: sys.exit("a text")
"""
#: Runs a job's script as the harness does, without torch; ends as the interpreter would.
AS_MAIN = """
import sys
del sys.path[0]
sys.path[:0] = [{root!r}]
from fakedist.options import Job
from fakedist.rank.preloading import run_as_main, without_our_frames
del sys.path[0]
try:
    run_as_main(Job(world_size=1, rank=0, target={target!r}, is_module={is_module!r}, arguments={arguments!r}))
except Exception as error:
    error = error.with_traceback(error.__traceback__.tb_next)  # without the frame of this text
    error.__traceback__ = without_our_frames(error)
    sys.excepthook(type(error), error, error.__traceback__)
    sys.exit(1)
"""
ROOT = str(Path(__file__).parents[3])


def job(target: str, is_module: bool = False) -> Job:
    return Job(world_size=1, rank=0, target=target, is_module=is_module)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a script, a package, a directory to run, a zip file to run, and a link to the script."""
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (tmp_path / "script.py").write_text(SHOWS_ITSELF)
    (tmp_path / "link.py").symlink_to(tmp_path / "script.py")
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("from .inner.sibling import WORD\n" + SHOWS_ITSELF)
    (package / "inner/__init__.py").write_text("print('imported')")
    (package / "inner/sibling.py").write_text("WORD = 'word'")
    (package / "inner/train.py").write_text("from .sibling import WORD\n" + SHOWS_ITSELF)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/__main__.py").write_text(SHOWS_ITSELF)
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        archive.writestr("__main__.py", SHOWS_ITSELF)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "is_module"),
    [
        ("script.py", False),
        ("./link.py", False),
        ("folder", False),
        ("zipped.zip", False),
        ("package", True),
        ("package.inner.train", True),
    ],
)
@pytest.mark.parametrize("arguments", [("--lr", "1"), ("fail",), ("exit",)])
def test_a_script_finds_what_it_finds_under_python(
    project: Path, target: str, is_module: bool, arguments: tuple[str, ...]
) -> None:
    module = ["-m"] if is_module else []
    plain = subprocess.run([sys.executable, *module, target, *arguments], capture_output=True, text=True)
    code = AS_MAIN.format(root=ROOT, target=target, is_module=is_module, arguments=arguments)
    ours = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert "__main__" in ours.stdout


def test_a_script_or_a_module_that_is_there_is_found_without_importing_its_package(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in ("script.py", "folder", "zipped.zip", "package.inner.train", "package"):
        check_script(job(target, is_module=target.startswith("package")))
    assert capsys.readouterr().out == ""
    assert "package" not in sys.modules


@pytest.mark.parametrize(
    ("target", "is_module", "told"),
    [
        ("absent.py", False, "no such script: absent.py"),
        ("package/inner", False, "without a __main__.py"),
        ("package.absent", True, "no module named package.absent"),
        ("absent.inner", True, "no module named absent"),
        ("package.inner", True, "without a __main__ module"),
    ],
)
def test_a_script_that_is_not_there_is_named(project: Path, target: str, is_module: bool, told: str) -> None:
    with pytest.raises(JobError, match=told):
        check_script(job(target, is_module))


def test_a_package_that_only_a_finder_of_its_own_finds_is_found(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "mine"
    elsewhere.mkdir()
    for name in ("__init__.py", "train.py"):
        (elsewhere / name).write_text("")

    class Editable:  # what pip install -e leaves in sys.meta_path
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return spec_from_file_location(name, elsewhere / "__init__.py") if name == "mine" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable])
    check_script(job("mine.train", is_module=True))
    with pytest.raises(JobError, match=r"no module named mine\.absent"):
        check_script(job("mine.absent", is_module=True))
    assert "mine" not in sys.modules


def test_a_syntax_error_is_shown_as_python_shows_it(project: Path) -> None:
    (project / "bad.py").write_text("x = 1\nif x\n    pass\n")
    with pytest.raises(ScriptSyntaxError) as error:
        check_script(job("bad.py"))
    plain = subprocess.run([sys.executable, "bad.py"], capture_output=True, text=True)
    assert str(error.value) == plain.stderr.rstrip()
