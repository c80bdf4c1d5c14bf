import os
import sqlite3
from pathlib import Path

import pytest

from fakedist.errors import ReportError
from fakedist.results.nsys.activity import open_database
from fakedist.results.nsys.imported import StepChoice, read_trace
from tests.unit.results.nsys.made_up import MadeUp, training


def read(path: Path) -> None:
    with open_database(path) as database:
        read_trace(database, StepChoice())


def error_of(path: Path) -> str:
    with pytest.raises(ReportError) as raised:
        read(path)
    assert "\n" not in raised.value.message
    assert raised.value.hint
    return raised.value.message


def test_a_missing_file(tmp_path: Path) -> None:
    assert "No such file" in error_of(tmp_path / "report.sqlite")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "report.sqlite").touch()
    assert error_of(tmp_path / "report.sqlite").endswith("is empty")


def test_a_file_that_is_no_sqlite(tmp_path: Path) -> None:
    (tmp_path / "report.sqlite").write_text("{}" * 100)
    assert error_of(tmp_path / "report.sqlite").endswith("is not an SQLite file")


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    path = training().write(tmp_path / "report.sqlite")
    path.write_bytes(path.read_bytes()[:-4096])
    assert "is cut off" in error_of(path)


def test_a_file_that_is_damaged_inside(tmp_path: Path) -> None:
    path = training().write(tmp_path / "report.sqlite")
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    assert "cannot be read" in error_of(path)


def test_an_export_that_was_interrupted(tmp_path: Path) -> None:
    path = training().write(tmp_path / "report.sqlite")
    path.with_name("report.sqlite-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7")
    assert "interrupted" in error_of(path)


def test_a_database_of_something_else(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "report.sqlite")
    connection.execute("CREATE TABLE photos (id)")
    connection.commit()
    connection.close()
    assert "no StringIds" in error_of(tmp_path / "report.sqlite")


def test_a_report_without_kernels(tmp_path: Path) -> None:
    report = MadeUp()
    report.range(0, 10, "step 1")
    assert "has no kernels" in error_of(report.write(tmp_path / "report.sqlite"))


def test_a_view_without_end_is_left(tmp_path: Path) -> None:
    path = training().write(tmp_path / "report.sqlite")
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE IF EXISTS TARGET_INFO_GPU")
    numbers = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n AS name, 1 AS id FROM r"
    connection.execute(f"CREATE VIEW TARGET_INFO_GPU AS {numbers}")
    connection.commit()
    connection.close()
    with pytest.raises(ReportError, match=r"reading it does not end: \d+,\d+,\d+ steps"), open_database(path) as found:
        found.rows("SELECT COUNT(*) FROM TARGET_INFO_GPU")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "report.sqlite")
    assert "is not an Nsight report: it is a pipe" in error_of(tmp_path / "report.sqlite")
