"""Torch in a template, with a package of that name that is quick to import."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from fakedist.options import Job
from fakedist.rank.preloading import Learned, differing_variable, key_of
from tests.conftest import ROOT

JOB = Job(world_size=8, rank=0, target="train.py")
TORCH = {
    "__init__": "class G:\n    def seed(self): pass\ndefault_generator = G()\ndef f(): pass\nimport torch.early\n",
    "early": "import other\nfrom torch import f\n",
    "late": "from torch import f\nVALUE = 3\n",
    "threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
    "sets": "import os\nos.environ['OF_TORCH'] = '1'\n",
}
PRELOADED = """
import os, sys
from fakedist.patch import patched
from fakedist.rank.preloading import Learned, Preloaded
known = set(sys.modules)
import torch
early = set(sys.modules)
import torch.late
environment = dict(os.environ)
learned = Learned("", ("", 8, None), {}, "/", environment, list(sys.path), environment | {"LATER": "1"}, [], [3, 0, 0])
names = [name for name in sys.modules if name not in known and name != "other"]
preloaded = Preloaded(learned, early, {name: sys.modules[name] for name in names})
preloaded.become_finder()
stopped = []
preloaded.restart = stopped.append
own, original = torch, torch.f
del torch
assert not {"torch", "torch.late"} & sys.modules.keys()
"""


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    (tmp_path / "torch").mkdir()
    for name, text in TORCH.items():
        (tmp_path / "torch" / f"{name}.py").write_text(text)
    (tmp_path / "other.py").write_text("import __main__ as main\n")
    return tmp_path


def run(directory: Path, program: str) -> str:
    code = f"import sys\nsys.path[:0] = {[str(directory), str(ROOT)]}\n{program}"
    done = subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            """
from torch.late import VALUE
print(VALUE, sys.modules["torch"] is own, own.__spec__.loader is preloaded)
""",
            "3 True False",
        ),
        (
            """
import json.tool, torch
preloaded.cuda_begins()
names = list(sys.modules)
print(names.index("torch") < names.index("torch.late") < names.index("json.tool"))
""",
            "True",
        ),
        ("sys.modules['__main__'] = sys; import torch; print(torch.early.other.main is sys)", "True"),
        ("preloaded.show(); print('torch.late' in sys.modules, stopped)", "True []"),
        ("os.environ['OF_SCRIPT'] = '1'; import torch; print(stopped)", "['OF_SCRIPT']"),
        ("os.environ['RANK'] = '1'; import torch; print(stopped)", "[]"),
        ("sys.path.append('/elsewhere'); import torch.late; print(stopped)", "['sys.path']"),
        (
            """
import torch
preloaded.surrounded()
os.environ.update(RANK="1", LATER="1", OTHER="1")
preloaded.over()
os.environ["AFTERWARDS"] = "1"
print(stopped)
""",
            "['OTHER']",
        ),
        (
            """
import torch
with patched(torch, "f", len):
    preloaded.surrounded()
print(torch.late.f is len, torch.early.f is original)
""",
            "True True",
        ),
    ],
)
def test_the_script_finds_torch_as_if_it_had_imported_it(torch: Path, script: str, expected: str) -> None:
    assert run(torch, f"{PRELOADED}{script}") == expected


LEARNS = """
import json, os
from pathlib import Path
from fakedist.importing import when_imported
from fakedist.options import Job
from fakedist.rank.preloading import Learned, Learner
learner = Learner(Path("learned.json"), Job(world_size=8, rank=0, target="train.py"), {"AT": "start"})
with when_imported(learner.asked, lambda module: learner.imported()):
    os.environ["BEFORE"] = "1"
    import json.tool, torch.late
    learner.cuda_begins()
    os.environ["AFTER"] = "1"
    import torch.sets
    learner.write()
learned = Learned.read(Path("learned.json"))
print(learned.modules, learned.started, learned.environment["BEFORE"], "AFTER" in learned.environment)
print(learned.ended["AFTER"], len(learned.counts))
"""


def test_what_is_imported_in_another_environment_is_left_to_each_rank(torch: Path) -> None:
    assert run(torch, LEARNS) == "['torch', 'torch.late'] {'AT': 'start'} 1 False\n1 3"


def test_there_is_nothing_to_learn_without_torch(torch: Path) -> None:
    assert Learned.read(torch / "learned.json") is None
    program = LEARNS.replace(", torch.late", "").replace("    import torch.sets\n", "").partition("learned = ")[0]
    run(torch, program)
    assert Learned.read(torch / "learned.json") is None


@pytest.mark.parametrize(
    ("here", "expected"),
    [
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


PRELOADS = """
import os, types
from contextlib import nullcontext
from pathlib import Path
from fakedist.rank import preloading
from fakedist.rank.preloading import Learned, preload
sys.modules["fakedist.rank.surroundings"] = types.ModuleType("surroundings")
preloading.virtual_gpu = lambda *gpu, **more: nullcontext(types.SimpleNamespace(visible=list))
os.execve = lambda *program: sys.exit()
path, here = Path("learned.json"), dict(os.environ)
Learned("", ("h100-80g", 8, None), {}, "/", here, list(sys.path), here, MODULES, None).write(path)
preloaded = None
try:
    preloaded = preload(path)
finally:
    print(Learned.read(path).modules, preloaded is not None, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("torch.early", "['torch', 'torch.late', 'torch.early'] True False"),
        ("torch.threads", "['torch', 'torch.late'] False True"),
        ("torch.missing", "['torch', 'torch.late'] False True"),
    ],
)
def test_a_template_starts_again_without_an_import_after_which_nothing_could_fork(
    torch: Path, last: str, expected: str
) -> None:
    assert run(torch, PRELOADS.replace("MODULES", str(["torch", "torch.late", last]))) == expected
