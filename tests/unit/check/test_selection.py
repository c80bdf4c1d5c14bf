"""Findings that fail a check are selected by code, path and job."""

from pathlib import Path

import pytest

from fakedist.check.config import read_config
from fakedist.errors import CheckError
from fakedist.rundir.finding import Finding

JOB = '[[check.jobs]]\nname = "net"\nscript = "train.py"\nworld_size = 8\n'


def takes(folder: Path, keys: str, code: str, line: str = "", *, of_job: str = "") -> bool:
    path = folder / "fakedist.toml"
    path.write_text(f"[check]\n{keys}\n{JOB}{of_job}\n")
    config = read_config(path)
    finding = Finding(code, "", "", "", f"{line}:3 (f)" if line else "")
    return config.jobs[0].selection.takes(finding, config.root)


@pytest.mark.parametrize(
    ("keys", "code", "is_taken"),
    [
        ("", "FD101", False),
        ('select = ["FD1"]', "FD101", True),
        ('select = ["FD1"]', "FD203", False),
        ('select = ["FD1", "FD203"]', "FD203", True),
        ('select = ["ALL"]', "FD304", True),
        ('select = ["ALL"]\nignore = ["FD3"]', "FD304", False),
        ('select = ["FD304"]\nignore = ["FD3"]', "FD304", True),
        ('select = ["FD304"]\nignore = ["FD3"]', "FD303", False),
        ('select = ["FD3"]\nignore = ["FD3"]', "FD304", False),
        ('select = ["FD3"]\nignore = ["ALL"]', "FD304", True),
    ],
)
def test_codes_are_selected_by_what_they_begin_with(tmp_path: Path, keys: str, code: str, is_taken: bool) -> None:
    assert takes(tmp_path, keys, code) == is_taken


@pytest.mark.parametrize(
    ("file", "is_taken"),
    [("{}/legacy/train.py", False), ("{}/train.py", True), ("/site-packages/lib/a.py", False), ("", True)],
)
def test_a_files_findings_are_ignored_by_its_path(tmp_path: Path, file: str, is_taken: bool) -> None:
    keys = 'select = ["ALL"]\nper-file-ignores = { "legacy/*" = ["FD1"], "*/site-packages/*" = ["ALL"] }'
    assert takes(tmp_path, keys, "FD101", file.format(tmp_path)) == is_taken


def test_a_job_has_its_own_selection(tmp_path: Path) -> None:
    assert not takes(tmp_path, 'select = ["FD1"]', "FD101", of_job='select = ["FD2"]')
    assert takes(tmp_path, 'select = ["FD1"]', "FD203", of_job='select = ["FD2"]')


@pytest.mark.parametrize("code", ["FD999", "", "fd101", "FD101 "])
def test_a_code_that_does_not_exist_is_refused_with_what_was_meant(tmp_path: Path, code: str) -> None:
    with pytest.raises(CheckError, match=f"there is no rule '{code}'"):
        takes(tmp_path, f'select = ["{code}"]', "FD101")
