"""The scripts of a page: its modules joined into one script, plotly.js, and a policy that allows these two alone."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakedist.analysis.topology import ranks_of
from fakedist.report.content.run import run_report
from fakedist.report.page import assets
from fakedist.report.page.assets import joined, page_scripts, plotly_text
from fakedist.report.render.html import report_page
from fakedist.results.opening import open_run
from tests.unit.report.handmade import ended_well
from tests.unit.report.reading import page

ROOT = Path(__file__).parent.parent.parent.parent.parent
NODE = shutil.which("node")


def allowed(text: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


def write_modules(folder: Path, **modules: str) -> None:
    for name, text in modules.items():
        (folder / f"{name}.js").write_text(text)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(assets, "SCRIPTS", tmp_path)
    joined.cache_clear()
    yield tmp_path
    joined.cache_clear()


def test_the_policy_allows_the_pages_own_scripts_and_styles_alone(tmp_path: Path) -> None:
    text = page(open_run(ended_well(tmp_path / "run")))
    found = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert found is not None
    policy = dict(part.split(" ", 1) for part in found[1].split("; "))
    script = text[text.rindex("<script>") + len("<script>") : text.rindex("</script>")]
    style = text[text.index("<style>") + len("<style>") : text.index("</style>")]
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == f"{allowed(script.encode())} {allowed(plotly_text())}"
    assert policy["style-src-elem"] == f"{allowed(style.encode())} {allowed(b'')}"


def test_pages_next_to_each_other_share_one_plotly(tmp_path: Path) -> None:
    run = open_run(ended_well(tmp_path / "run"))
    alone, shared = page(run), report_page(run_report(run), "plotly.min.js")
    assert '<script src="plotly.min.js"></script>' in shared
    assert "'self'" in shared
    assert "'self'" not in alone
    assert len(alone) - len(shared) > 500_000


def test_modules_become_one_script_with_nothing_global(modules: Path) -> None:
    write_modules(
        modules,
        a="import { twice as double } from './b.js';\nimport { one } from './c.js';\nconsole.log(double(one));\n",
        b="import { one } from './c.js';\nconst own = 2;\nexport function twice(x) {\n  return own * x * one;\n}\n",
        c="export const one = 1;\nconst own = 5;\n",
    )
    text = joined("a")
    assert text.index("module_c") < text.index("module_b") < text.index("module_a")
    assert "export" not in text
    assert "import" not in text
    if NODE is not None:
        after = f"{text}\nconsole.log(typeof own, typeof one, typeof module_c);"
        ran = subprocess.run([NODE, "-"], input=after, capture_output=True, text=True, check=True, timeout=60)
        assert ran.stdout.split() == ["2", "undefined", "undefined", "undefined"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import { b } from './b.js';", "a -> b -> a"),
        *(
            (line, r"a\.js cannot be joined")
            for line in ("import b from './b.js';", "export default 1;", "export { x };")
        ),
    ],
)
def test_circles_and_modules_of_another_form_are_refused(modules: Path, line: str, message: str) -> None:
    write_modules(modules, a=f"{line}\n", b="import { a } from './a.js';\n")
    with pytest.raises(ValueError, match=message):
        joined("a")


@pytest.mark.parametrize("entry", ["page", "compare"])
def test_our_script_ends_no_element_and_runs_no_text(entry: str) -> None:
    own = page_scripts(entry, "").own
    assert "</script" not in own
    for word in ("eval(", "new Function", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"):
        assert word not in own


def test_plotly_is_the_version_that_is_built_and_runs_no_text() -> None:
    text = plotly_text().decode()
    built = json.loads((ROOT / "tools" / "plotly" / "package.json").read_text())["dependencies"]["plotly.js"]
    assert text.startswith(f"/* plotly.js {built}, ")
    assert "new Function" not in text
    licences = (Path(assets.__file__).parent / "plotly" / "LICENSES.txt").read_text()
    assert f"plotly.js {built} (MIT)" in licences


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("text", ["", "3", "0,3,5", "0-7", "0-56:8", "0-3,8,16-24:4"])
def test_the_page_reads_ranks_as_python_does(text: str) -> None:
    assert NODE is not None
    address = (assets.SCRIPTS / "groups.js").as_uri()
    program = (
        f"import {{ ranksOf }} from {json.dumps(address)}; console.log(JSON.stringify(ranksOf({json.dumps(text)})));"
    )
    command = [NODE, "--input-type=module", "--eval", program]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(ran.stdout) == list(ranks_of(text))
