"""JUnit, annotations and Markdown of one check that has one of everything."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fakedist.check.checking import Checked, Mismatch
from fakedist.check.config import Figure, read_config
from fakedist.check.judging import JudgedFigure
from fakedist.check.outputs import (
    check_report,
    figure_columns,
    github_annotations,
    junit_text,
    outcome,
)
from fakedist.errors import ScriptError
from fakedist.report.render.markdown import report_markdown

GIB = float(1 << 30)


@pytest.fixture
def checked(tmp_path: Path) -> Checked:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/model, 2.py").write_text("pass\n")
    (tmp_path / "pyproject.toml").write_text(
        '[[tool.fakedist.check.jobs]]\nname = "net"\nscript = "train.py"\nworld_size = 8\n'
    )
    grew = JudgedFigure("net", 0, Figure("peak_allocated"), 6 * GIB, None, 5 * GIB, 5.05 * GIB, "1%")
    over = JudgedFigure("net", 0, Figure("layers", "h.*.mlp"), 3 * GIB, 2 * GIB)
    return Checked(
        read_config(tmp_path / "pyproject.toml"),
        judged=[
            JudgedFigure(**{**grew.__dict__, "blame": "activations of h.*", "line": "src/model, 2.py:7 (forward)"}),
            JudgedFigure(**{**over.__dict__, "line": "/elsewhere/lib.py:3 (call)"}),
            JudgedFigure("net", 0, Figure("headroom"), 3 * GIB, 2 * GIB),
            JudgedFigure("net", 1, Figure("peak_reserved"), 5 * GIB),
        ],
        warnings=["the baseline of net was made with other settings: torch 1 -> 2"],
        misfits=["net rank 1 does not fit the GPU: CUDA out of memory"],
        mismatches=[Mismatch("net", "net: the job hangs", "src/model, 2.py:1 (forward)")],
    )


def test_junit_has_what_its_schemas_ask_for(checked: Checked) -> None:
    checked.judged.append(JudgedFigure("net", 1, Figure("groups", "of\x01two"), 1.0, 2.0))
    checked.failures.append(ScriptError("net rank 2: the script failed: \x00", output="Traceback \x1b[31m <&>"))
    root = ElementTree.fromstring(junit_text(checked))
    assert root.tag == "testsuites"
    assert root.attrib == {}
    suites = list(root)
    assert [suite.attrib["id"] for suite in suites] == [str(number) for number in range(len(suites))]
    for suite in suites:
        assert set(suite.attrib) == {
            *("name", "package", "id", "timestamp", "hostname"),
            *("tests", "failures", "errors", "time"),
        }
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.attrib["timestamp"])
        tags = [child.tag for child in suite]
        cases = suite.findall("testcase")
        assert tags == ["properties", *("testcase" for _ in cases), "system-out", "system-err"]
        assert suite.attrib["tests"] == str(len(cases))
        for kind in ("failure", "error"):
            assert suite.attrib[f"{kind}s"] == str(len(suite.findall(f"testcase/{kind}")))
        for case in cases:
            assert set(case.attrib) == {"name", "classname", "time"}
            assert all(set(told.attrib) == {"message", "type"} for told in case)
    assert "group of?two" in [case.attrib["name"] for case in root.iter("testcase")]
    failures = [told.attrib["type"] for told in root.iter("failure")]
    assert failures == ["baseline", "budget", "out_of_memory", "match"]
    (error,) = root.iter("error")
    assert error.attrib["message"] == "net rank 2: the script failed: ?"
    assert "Traceback ?[31m <&>" in [each.text for each in root.iter("system-out")]


def test_annotations_escape_what_ends_them(checked: Checked) -> None:
    warning, grew, *_ = github_annotations(checked)
    assert warning == "::warning title=fakedist::the baseline of net was made with other settings: torch 1 -> 2"
    assert grew.startswith("::error file=src/model%2C 2.py,line=7,title=fakedist baseline::net rank 0: peak allocated")
    assert "(+20.0%25)" in grew


def test_the_table_leaves_out_columns_with_nothing_in_them(checked: Checked) -> None:
    names = [column.name for column in figure_columns(checked.judged)]
    assert names == ["job", "rank", "figure", "is", "budget", "baseline", "change", "allowed", ""]
    assert [column.name for column in figure_columns(checked.judged[2:3])] == [
        "job", "rank", "figure", "is", "budget", ""
    ]  # fmt: skip
    verdicts = figure_columns(checked.judged)[-1].cells
    assert verdicts == ["GREW", "EXCEEDED", "ok", ""]


def test_markdown_and_json_have_all_of_it(checked: Checked) -> None:
    checked.failures.append(ScriptError("net rank 2: the script failed", output="Traceback ```"))
    text = report_markdown(check_report(checked))
    assert text.startswith("**fakedist check: 1 script failed, so nothing was judged**\n")
    assert "- net rank 0: layers h.\\*.mlp is 3.00 GiB, 1.00 GiB over its budget of 2.00 GiB" in text
    assert text.count("```") == 2
    assert "| net | 0 | headroom | 3.00 GiB | 2.00 GiB |" in text
    found = json.loads(json.dumps(check_report(checked).data(), allow_nan=False))
    assert [each["is_exceeded"] for each in found["findings"]] == [True, True, False, False]
    assert found["findings"][1]["part"] == "h.*.mlp"
    assert found["exit_code"] == 1


def test_the_worst_decides_the_exit_code(checked: Checked) -> None:
    assert (checked.exit_code, outcome(checked)) == (4, "1 rank did not fit the GPU")
    checked.misfits.clear()
    assert (checked.exit_code, outcome(checked)) == (5, "the calls of 1 job do not match")
    checked.mismatches.clear()
    assert (checked.exit_code, outcome(checked)) == (3, "2 figures exceeded")
    checked.failures.append(ScriptError("net rank 2: the script failed"))
    assert (checked.exit_code, outcome(checked)) == (1, "1 script failed, so nothing was judged")
    checked.failures.clear()
    checked.judged = checked.judged[2:]
    assert (checked.exit_code, outcome(checked)) == (0, "all within budget")
