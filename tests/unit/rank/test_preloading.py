"""The imports of fork servers of ranks, with a package named torch that is quick to import."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fakedist.options import Job
from fakedist.rank.preloading import Imports, differing_variables, key_of
from tests.conftest import ROOT

JOB = Job(world_size=8, rank=0, target="train.py")
TORCH = {
    "__init__": "class G:\n    def seed(self): pass\ndefault_generator = G()\ndef f(): pass\nimport torch.early\n",
    "early": "import other\nfrom torch import f\n",
    "late": "from torch import f\nVALUE = 3\n",
    "threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
    "sets": "import os\nos.environ['OF_TORCH'] = '1'\n",
    "paths": "import sys\nsys.path.append('/of torch')\n",
}
FORKED = """
import os, sys
from fakedist.patch import patched
from fakedist.rank.preloading import ForkedRank, Imports
import torch.late
imported = os.environ | {"EARLY": "1"}
imports = Imports("", {}, "/", imported, [], ["torch"], list(sys.path), [3, 0, 0], imported | {"LATER": "1"})
forked = ForkedRank(imports, [torch.late], 1, [])
restarts = []
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
        ("os.environ['EARLY'] = '1'", "[]"),
        ("os.environ['EARLY'] = '1'; os.environ.update(RANK='1', LATER='1')", "[]"),
        ("os.environ['EARLY'] = '1'; os.environ['OTHER'] = '1'", "['OTHER']"),
        ("os.environ['EARLY'] = '2'", "['EARLY']"),
        ("", "['EARLY']"),
        ("os.environ['EARLY'] = '1'; del os.environ['EARLY']", "['EARLY']"),
        ("os.environ['EARLY'] = '1'; sys.path.append('/elsewhere')", "['sys.path']"),
    ],
)
def test_a_rank_restarts_that_sets_another_environment_than_the_first(torch: Path, script: str, expected: str) -> None:
    program = f"""
with forked.watched(restarts.append):
    {script}
    forked.cuda_begins()
    forked.over()
    os.environ["AFTERWARDS"] = "1"
print(restarts[:1])
"""
    assert run(torch, FORKED + program) == expected


def test_modules_that_came_late_have_what_replaces_torchs_functions(torch: Path) -> None:
    script = """
original = torch.f
with patched(torch, "f", len), forked.watched(restarts.append):
    print(torch.late.f is len, torch.early.f is original)
"""
    assert run(torch, f"{FORKED}{script}") == "True True"


FIRST = """
import json, os
from pathlib import Path
from fakedist.rank.preloading import FirstRank, Imports
os.environ["AT"] = "start"
first = FirstRank(Path("imports.json"), "key")
with first.watched(print):
    os.environ["BEFORE"] = "1"
    import json.tool, torch.late
    first.cuda_begins()
    os.environ["AFTER"] = "1"
    import torch.sets
    first.over()
imports = Imports.read(Path("imports.json"))
print(imports.key, imports.modules, imports.started["AT"], "BEFORE" in imports.started, imports.environment["BEFORE"])
print("AFTER" in imports.environment, imports.ended["AFTER"], len(imports.counts))
"""


def test_imports_in_another_environment_are_left_to_each_rank(torch: Path) -> None:
    assert run(torch, FIRST) == "key ['torch', 'torch.late'] start False 1\nFalse 1 3"


@pytest.mark.parametrize("missing", [", torch.late", "    first.cuda_begins()\n"])
def test_nothing_is_written_without_torch_or_without_cuda(torch: Path, missing: str) -> None:
    program = FIRST.replace(missing, "").replace("    import torch.sets\n", "").partition("imports = ")[0]
    run(torch, program)
    assert Imports.read(torch / "imports.json") is None


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ({"A": "1", "RANK": "7", "MASTER_PORT": "1"}, []),
        ({"A": "2", "RANK": "0"}, ["A"]),
        ({"RANK": "0"}, ["A"]),
        ({"A": "1", "OMP_NUM_THREADS": "1"}, ["OMP_NUM_THREADS"]),
    ],
)
def test_variables_of_ranks_make_no_difference(here: dict[str, str], expected: list[str]) -> None:
    assert differing_variables(here, {"A": "1", "RANK": "0"}) == expected


def test_a_script_in_an_environment_has_its_own_server() -> None:
    assert key_of(JOB) == key_of(dataclasses.replace(JOB, rank=3, arguments=("--tp", "2")))
    assert key_of(JOB) != key_of(dataclasses.replace(JOB, target="other.py"))
    assert key_of(JOB) != key_of(dataclasses.replace(JOB, environment=(("A", "1"),)))


SERVES = """
import os, types
from contextlib import nullcontext
from pathlib import Path
from fakedist.rank import preloading
from fakedist.rank.preloading import Imports, forked_rank
class Restarts(Exception): pass
def restart(*program): raise Restarts
def serve(door, serves):
    print(Imports.read(path).modules, serves, sys.modules["other"].main is preloading.main_module())
    sys.exit()
sys.modules["fakedist.rank.surroundings"] = types.ModuleType("surroundings")
preloading.virtual_gpu = lambda *gpu, **more: nullcontext(types.SimpleNamespace(visible=list))
preloading.end_with_parent = print
preloading.socket = types.SimpleNamespace(socket=lambda fileno: None)
preloading.serve, os.execve = serve, restart
path, here = Path("imports.json"), dict(os.environ)
sys.modules.pop("numpy", None)
Imports("", here, "/", here, list(sys.path), MODULES, [], [0, 0, 0], here).write(path)
try:
    forked_rank(str(path), "3")
except Restarts:
    print(Imports.read(path).modules, "restarts")
"""


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("torch.early", "['torch', 'torch.late', 'torch.early'] True True"),
        ("torch.threads", "['torch', 'torch.late'] restarts"),
        ("torch.paths", "['torch', 'torch.late'] restarts"),
        ("torch.missing", "['torch', 'torch.late'] restarts"),
    ],
)
def test_a_server_starts_again_without_an_import_after_which_no_rank_may_fork(
    torch: Path, last: str, expected: str
) -> None:
    assert run(torch, SERVES.replace("MODULES", str(["torch", "torch.late", last]))).splitlines()[1:] == [expected]


WANDB = """
import os, random, threading
from fakedist.rank.fork_server import can_fork
from fakedist.rank.preloading import _UNREAD
reads = set()
class Watched(dict):
    def __getitem__(self, key):
        reads.add(os.fsdecode(key))
        return super().__getitem__(key)
    def __iter__(self):
        reads.update(_UNREAD)
        return super().__iter__()
before, path, state = dict(os.environ), list(sys.path), random.getstate()
os.environ._data = Watched(os.environ._data)
import wandb
print(sorted(reads & _UNREAD), "torch" in sys.modules, threading.active_count())
print(can_fork(), dict(os.environ) == before, sys.path == path)
print(random.getstate() == state)
"""


@pytest.mark.skipif(find_spec("wandb") is None, reason="not installed: pip install wandb")
def test_importing_wandb_has_no_effect_that_a_rank_must_see(tmp_path: Path) -> None:
    assert run(tmp_path, WANDB) == "[] False 1\nTrue True True\nTrue"
