from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from fakedist.errors import SweepError
from fakedist.section import Section
from fakedist.sweep.command import Filling, PointFile, read_plain, read_point_file, toml_text

FILLING = Filling({"tp": 4, "name": 'a "b"\n'}, {})
BASE = {"model": {"name": "llama", "layers": [1, {"x": 2}]}, "steps": 10}


def made(file_name: str, changes: dict[str, object], content: dict[str, object] | None = None) -> str:
    keys = tuple((tuple(key.split(".")), value) for key, value in changes.items())
    return PointFile("config", file_name, BASE if content is None else content, keys).text(FILLING)


@pytest.mark.parametrize(
    ("file_name", "read"), [("c.toml", tomllib.loads), ("c.json", json.loads), ("c.yaml", yaml.safe_load)]
)
def test_a_file_has_its_values_replaced(file_name: str, read: object) -> None:
    assert callable(read)
    text = made(file_name, {"model.tp": "{tp}", "model.layers.1.x": "n{tp}", "new.deep.key": "{name}", "steps": 2.5})
    assert read(text) == {
        "model": {"name": "llama", "layers": [1, {"x": "n4"}], "tp": 4},
        "steps": 2.5,
        "new": {"deep": {"key": 'a "b"\n'}},
    }
    assert BASE == {"model": {"name": "llama", "layers": [1, {"x": 2}]}, "steps": 10}


def test_toml_of_any_plain_values_reads_back() -> None:
    content = {
        "a b": 1,
        "": "empty",
        "ü": "é\u0001\x7f\\",
        "f": [1e300, -0.0, float("inf")],
        "t": {"u": {"v": True}, "w": {}},
        "list": [{"x": [[]]}, {}],
    }
    assert tomllib.loads(toml_text(content)) == content


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps.x": 1}, "is 10, not a table"),
        ({"model.layers.7": 1}, "is a list of 2"),
        ({"model.layers.x": 1}, "list"),
    ],
)
def test_a_place_that_is_no_table_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SweepError, match=message):
        made("c.toml", changes)


def test_a_value_without_a_form_is_refused() -> None:
    with pytest.raises(SweepError, match="has no form in TOML"):
        made("c.toml", {}, {"a": None})
    with pytest.raises(SweepError, match="cannot be written"):
        made("c.json", {}, {"a": float("nan")})


def test_a_yaml_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text(f"a: !!python/object/apply:os.system ['touch {tmp_path}/ran']\n")
    with pytest.raises(SweepError, match="is not YAML"):
        read_plain(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("b.toml", "a = ", "is not TOML"),
        ("b.json", "[1]", "is not a table"),
        ("b.yaml", "a: [", "is not YAML"),
        ("b.json", "[" * 100_000, "is not JSON"),
        ("b.json", None, "cannot be read"),
    ],
)
def test_a_base_that_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SweepError, match=message):
        read_plain(tmp_path / name)


@pytest.mark.parametrize("called", ["../../evil.toml", "/etc/evil.toml", "a/b.toml"])
def test_a_file_is_written_into_the_points_own_directory(tmp_path: Path, called: str) -> None:
    section = Section("sweep.toml", {"name": called, "set": {"a": 1}}, SweepError)
    assert "/" not in read_point_file("config", section, tmp_path).file_name


def test_a_file_without_a_known_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="has an ending of"):
        read_point_file("config", Section("sweep.toml", {"name": "run.sh"}, SweepError), tmp_path)
