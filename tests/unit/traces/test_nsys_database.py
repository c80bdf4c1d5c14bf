import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from fakedist.errors import ReportError
from fakedist.traces.nsys_report import open_database, read_trace
from fakedist.traces.one_step import StepChoice
from tests.unit.traces.nsys_made_up import training


def execute(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def test_a_view_without_end_is_left(tmp_path: Path) -> None:
    path = training().write(tmp_path / "report.sqlite")
    numbers = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n AS name, 1 AS id FROM r"
    execute(path, "DROP TABLE TARGET_INFO_GPU", f"CREATE VIEW TARGET_INFO_GPU AS {numbers}")
    with pytest.raises(ReportError, match=r"reading it does not end: \d+,\d+,\d+ steps"), open_database(path) as found:
        found.rows("SELECT COUNT(*) FROM TARGET_INFO_GPU")


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (Path.unlink, "No such file"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_text("{}" * 100), "is not an SQLite file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4096]), "is cut off"),
        (lambda path: path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 40960), "cannot be read"),
        (
            lambda path: path.with_name("report.sqlite-journal").write_bytes(b"\xd9\xd5\x05\xf9 \xa1c\xd7"),
            "interrupted",
        ),
        (lambda path: execute(path, "DROP TABLE StringIds"), "no StringIds"),
        (lambda path: execute(path, "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL"), "has no kernels"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "is not an Nsight report: it is a pipe"),
    ],
)
def test_a_file_that_is_no_report_is_refused_in_one_line(
    tmp_path: Path, damage: Callable[[Path], object], error: str
) -> None:
    path = training().write(tmp_path / "report.sqlite")
    damage(path)
    with pytest.raises(ReportError, match=error) as raised, open_database(path) as database:
        read_trace(database, StepChoice())
    assert "\n" not in raised.value.message
    assert raised.value.hint
