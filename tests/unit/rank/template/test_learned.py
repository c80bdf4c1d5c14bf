from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from fakedist.importing import when_imported
from fakedist.options import Job
from fakedist.rank.template.learned import Learned, Learner, Scene, is_installed, key_of, write_learned
from fakedist.rank.template.scenes import differing_variable

JOB = Job(world_size=8, rank=0, target="train.py")


def test_what_was_learned_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert Learned.read(tmp_path / "learned.json") is None
    scene = Scene({"HOME": "/"}, ["/lib"])
    learned = Learned(
        key_of(JOB), ("h100-80g", 8, None), {"A": "\udcff"}, "/", ["torch"], [("torch", scene)], {"torch": (3, 1)}
    )
    write_learned(tmp_path / "learned.json", learned)
    assert Learned.read(tmp_path / "learned.json") == learned


def test_a_learner_writes_installed_modules_in_the_order_of_their_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, own = tmp_path / "site-packages", tmp_path / "own"
    for name, text in {"outer": "import inner", "inner": "", "after": ""}.items():
        installed.mkdir(exist_ok=True)
        (installed / f"{name}.py").write_text(text)
    own.mkdir()
    (own / "mine.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(installed), str(own), *sys.path])
    for name in ("outer", "inner", "after", "mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    learner = Learner(tmp_path / "learned.json", JOB, {"AT": "start"})
    with when_imported(learner.asked, lambda module: learner.imported(module.__name__)):
        __import__("mine")
        monkeypatch.setenv("OF_SCRIPT", "1")
        __import__("outer")
        learner.cuda_begins()
        __import__("after")
    learner.write()
    for name in ("outer", "inner", "after", "mine"):
        del sys.modules[name]
    learned = Learned.read(tmp_path / "learned.json")
    assert learned is not None
    assert [name for name in learned.modules if not name.startswith("fakedist")] == ["outer", "inner"]
    assert [(name, scene.environment["OF_SCRIPT"]) for name, scene in learned.scenes] == [("outer", "1")]
    assert learned.environment == {"AT": "start"}
    assert list(learned.counts) == ["mine", "outer", "after"]


@pytest.mark.parametrize(
    ("place", "expected"),
    [("/v/lib/python3.11/site-packages/torch/__init__.py", True), ("/home/me/model.py", False), (None, False)],
)
def test_the_files_of_a_script_are_not_installed(place: str | None, expected: bool) -> None:
    assert is_installed(place) is expected


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ({"A": "1", "RANK": "0"}, ""),
        ({"A": "1", "RANK": "7", "MASTER_PORT": "1"}, ""),
        ({"A": "2", "RANK": "0"}, "A"),
        ({"RANK": "0"}, "A"),
        ({"A": "1", "OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS"),
    ],
)
def test_variables_of_ranks_make_no_difference(here: dict[str, str], expected: str) -> None:
    assert differing_variable(here, {"A": "1", "RANK": "0"}) == expected


def test_each_script_has_its_own_template() -> None:
    assert key_of(JOB) == key_of(dataclasses.replace(JOB, rank=3, arguments=("--tp", "2")))
    assert key_of(JOB) != key_of(dataclasses.replace(JOB, target="other.py"))
