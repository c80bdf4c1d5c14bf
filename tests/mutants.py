"""Change one thing at a time in rooms that compute figures, and see whether their unit tests notice.

    python -m tests.mutants                        a seeded sample; survivors with their lines, and the score
    python -m tests.mutants --sample 0 --only record/steps.py    every change of one file
    python -m tests.mutants --jobs 16              in as many processes, with the Python that runs it

The usual tools do not fit. mutmut wraps each function, and a wrapper keeps alive the arguments that the recording's
tests watch being freed. cosmic-ray starts pytest, and with it torch, anew for each change. Here a process that has
imported torch forks for each change, and runs the test files that cover its line, its own file's first.
Test files that fail without any change, such as for want of a package, are named and left out.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import copy
import importlib.abc
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

import pytest

ROOT = Path(__file__).parents[1]
#: What is changed, and where its tests are.
ROOMS = {
    "analysis": "tests/unit/analysis",
    "check": "tests/unit/check",
    "cost_model": "tests/unit/cost_model",
    "gpu/values": "tests/unit/gpu",
    "record": "tests/unit/record",
    "results": "tests/unit/results",
    "sweep": "tests/unit/sweep",
    "world/arrivals.py": "tests/unit/world/test_arrivals.py",
}
#: Seconds after which a test file hangs. With a change, its tests have a minute and several times what they took.
MOST_S = 600

_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: the ``node``-th of a walk through the file, changed in the ``variant``-th way."""

    path: str
    node: int
    variant: int
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The changes that a node allows, with words for them."""
    changed: ast.AST = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator]):
            changed.ops = [_COMPARE[type(operator)]()]
            yield _words(node, changed), changed
        case ast.BinOp(left=ast.Set(), op=ast.Sub()):
            pass  # sets have no sum
        case ast.BinOp(op=operator) if type(operator) in _BINARY and not _is_union(changed):
            changed.op = _BINARY[type(operator)]()
            yield _words(node, changed), changed
        case ast.BoolOp(op=operator):
            changed.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield _words(node, changed), changed
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield _words(node, operand), operand
        case ast.Constant(value=bool() as value):
            yield _words(node, ast.Constant(not value)), ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield _words(node, ast.Constant(value + 1)), ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            other = value / 9 or 1.0
            yield _words(node, ast.Constant(other)), ast.Constant(other)
        case ast.If(test=test) | ast.IfExp(test=test):
            changed.test = ast.Constant(False)
            yield f"never: if {ast.unparse(test)}", changed
        case ast.Expr(value=ast.Call() as call):
            yield f"gone: {ast.unparse(call)}", ast.Pass()
        case ast.AugAssign():
            yield f"gone: {ast.unparse(node)}", ast.Pass()


def _words(node: ast.AST, changed: ast.AST) -> str:
    return f"{ast.unparse(node)} -> {ast.unparse(changed)}"


def walk(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Each child that may change, as (parent, field, index); not annotations, errors' messages or imports of types."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "type_params", "msg") or isinstance(tree, ast.Raise):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not _is_type_checking(child) and not _changes_no_result(child):
                yield tree, field, index
                if not _is_negative(child):  # one literal, one change
                    yield from walk(child)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _changes_no_result(node: ast.AST) -> bool:
    """Whether this is ``zip``'s check of lengths, numpy's copies of its own, or the indentation of JSON."""
    return isinstance(node, ast.keyword) and node.arg in ("strict", "copy", "deepcopy", "indent")


def _is_negative(node: ast.AST) -> bool:
    """Whether this is a negative number, which Python parses as a sign and a number."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)


def _is_union(node: ast.AST) -> bool:
    """Whether this is a union of types, such as ``int | None``, of which no other form runs."""
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _is_union(left) and _is_union(right)
        case ast.Constant(value=value):
            return value is None
        case ast.Subscript(value=value):
            return _is_union(value)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return isinstance(getattr(builtins, name, None), type) or (
                name.strip("_")[:1].isupper() and not name.isupper()
            )
    return False


def _child(parent: ast.AST, field: str, index: int | None) -> ast.AST:
    value = getattr(parent, field)
    child: ast.AST = value if index is None else value[index]
    return child


def mutants(path: Path) -> list[Mutant]:
    """Every change of a file."""
    return [
        Mutant(str(path.relative_to(ROOT)), node, variant, getattr(child, "lineno", 0), text)
        for node, child in enumerate(_child(*step) for step in walk(ast.parse(path.read_bytes())))
        for variant, (text, _) in enumerate(changes(child))
    ]


def compiled(mutant: Mutant) -> CodeType:
    """The file's code with the change."""
    path = ROOT / mutant.path
    tree = ast.parse(path.read_bytes())
    parent, field, index = next(itertools.islice(walk(tree), mutant.node, None))
    child = _child(parent, field, index)
    _, changed = list(changes(child))[mutant.variant]
    ast.copy_location(changed, child)
    if index is None:
        setattr(parent, field, changed)
    else:
        getattr(parent, field)[index] = changed
    return compile(ast.fix_missing_locations(tree), str(path), "exec")


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the changed code in place of the file's."""

    def __init__(self, mutant: Mutant) -> None:
        parts = Path(mutant.path).with_suffix("").parts
        self._is_package = parts[-1] == "__init__"
        self._name, self._mutant = ".".join(parts[:-1] if self._is_package else parts), mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        file = ROOT / self._mutant.path
        folders = [str(file.parent)] if self._is_package else None
        return importlib.util.spec_from_file_location(fullname, file, loader=self, submodule_search_locations=folders)

    def exec_module(self, module: ModuleType) -> None:
        exec(compiled(self._mutant), module.__dict__)


def in_children(
    runs: Sequence[tuple[Callable[[], int], float]], jobs: int, folder: Path
) -> Iterator[tuple[int, int, float]]:
    """Run each in a forked process, silently; (its index, exit status, seconds) as they end.

    Args:
        runs: Each with the seconds after which it is killed, with all that it started; its status is then -9.
        jobs: How many run at a time.
        folder: Where each gets a temporary directory, removed when it ends.
    """
    running: dict[int, tuple[int, float]] = {}
    waiting = list(reversed(range(len(runs))))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index = waiting.pop()
                running[_forked(runs[index][0], folder / str(index))] = index, time.monotonic()
            pid, status = os.waitpid(-1, os.WNOHANG)
            for late, (index, began) in running.items():
                if not pid and time.monotonic() - began > runs[index][1]:
                    os.kill(late, signal.SIGKILL)
            if pid:
                index, began = running.pop(pid)
                _remove(pid, folder / str(index))
                yield index, os.waitstatus_to_exitcode(status), time.monotonic() - began
            else:
                time.sleep(0.02)
    finally:
        for pid, (index, _) in running.items():
            _remove(pid, folder / str(index))


def _forked(run: Callable[[], int], own: Path) -> int:
    """The process in which it runs, the leader of its group; the first that the kernel ends if memory is short."""
    own.mkdir()
    if pid := os.fork():
        return pid
    code = 70
    try:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        Path("/proc/self/oom_score_adj").write_text("1000")
        os.environ["TMPDIR"], tempfile.tempdir = str(own), None
        code = run()
    finally:
        os._exit(code)


def _remove(pid: int, own: Path) -> None:
    """Remove processes of its group and its files."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    shutil.rmtree(own, ignore_errors=True)


def _pytest(tests: Sequence[str], *plugins: object) -> int:
    # Rewritten assertions come with an import hook of their own, in front of the one that changes the code.
    options = ["-q", "-x", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(ROOT)]
    return int(pytest.main([*options, *tests], plugins=plugins))


class _Covering:
    """A plugin: which lines tests run, and which are run by imports."""

    def __init__(self, covering: object) -> None:
        self._covering = covering

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._covering.switch_context("tests")  # type: ignore[attr-defined]
        return (yield)


def cover(tests: str, written: Path) -> int:
    """Run a test file, and write {file: [lines]} of the files of which the tests, not only imports, run a line."""
    from coverage import Coverage

    covering = Coverage(data_file=None, source=[str(ROOT / "fakedist")], config_file=False)
    covering.start()
    code = _pytest([tests], _Covering(covering))
    covering.stop()
    data = covering.get_data()
    contexts = {name: data.contexts_by_lineno(name) for name in data.measured_files()}
    ran = {name: sorted(lines) for name, lines in contexts.items() if any("tests" in names for names in lines.values())}
    written.write_text(json.dumps({str(Path(name).relative_to(ROOT)): lines for name, lines in ran.items()}))
    return code


def covering_tests(by_line: dict[int, list[str]], mutant: Mutant) -> list[str]:
    """Test files that run a line or, where Python counts it to an earlier line of its statement, that one. The tests of
    its own file, which notice most, are first.
    """
    before = [covered for covered in by_line if covered <= mutant.line]
    own = f"/test_{Path(mutant.path).stem}.py"
    return sorted(by_line[max(before)], key=lambda file: (not file.endswith(own), file)) if before else []


def run_changed(mutant: Mutant, tests: Sequence[str]) -> int:
    """Run the tests with the change."""
    sys.meta_path.insert(0, Changed(mutant))
    return _pytest(tests)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sample", type=int, default=300, help="how many changes; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="files with this in their path")
    parser.add_argument("--jobs", type=int, default=1, help="how many changes at a time")
    chosen = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(ROOT)
    os.environ["FAKEDIST_BUILD_ANEW"] = "1"  # tests.unit.report.handmade; nothing of ours is imported before a change
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in ("torch", "torch.distributed", "torch._dynamo", "pandas", "pyarrow.parquet", "rich.console"):
        importlib.import_module(name)
    by_room = {
        room: [
            mutant for path in _files(ROOT / "fakedist" / room) if chosen.only in str(path) for mutant in mutants(path)
        ]
        for room in ROOMS
    }
    room_of = {mutant: room for room, changed in by_room.items() for mutant in changed}
    everything = list(room_of)
    random.Random(chosen.seed).shuffle(everything)
    sample = everything[: chosen.sample or None]
    results: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = Path(temporary)
        files = [
            str(file)
            for room in sorted({ROOMS[room_of[mutant]] for mutant in sample})
            for file in _files(Path(room), "test_*.py")
        ]
        covered: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        seconds: dict[str, float] = {}
        covers = [(partial(cover, file, folder / f"{index}.json"), MOST_S) for index, file in enumerate(files)]
        for index, code, took in in_children(covers, chosen.jobs, folder):
            if code:
                print(f"left out, as it fails without any change (exit {code}): {files[index]}", flush=True)
                continue
            seconds[files[index]] = took
            for path, lines in json.loads((folder / f"{index}.json").read_text()).items():
                for line in lines:
                    covered[path][line].append(files[index])
        tests = [covering_tests(covered[mutant.path], mutant) for mutant in sample]
        for mutant in (mutant for mutant, own in zip(sample, tests, strict=True) if not own):
            results[room_of[mutant]]["not covered"] += 1
            print(f"not covered  {mutant}")
        changed = [(mutant, own) for mutant, own in zip(sample, tests, strict=True) if own]
        runs = [(partial(run_changed, *pair), 60 + 4 * sum(seconds[file] for file in pair[1])) for pair in changed]
        for index, code, _ in in_children(runs, chosen.jobs, folder):
            mutant, _ = changed[index]
            results[room_of[mutant]]["noticed" if code else "survived"] += 1
            result = "hung" if code == -signal.SIGKILL else "noticed" if code else "survived"
            with contextlib.suppress(BrokenPipeError):
                print(f"{result:11}  {mutant}", flush=True)
    for room, counts in results.items():
        print(f"{counts['noticed']:4} of {counts.total():4} noticed, {counts['not covered']:3} not covered: {room}")
    noticed = sum(counts["noticed"] for counts in results.values())
    print(f"{noticed} of {len(sample)} changes noticed ({noticed / max(1, len(sample)):.0%}; {len(everything)} in all)")
    return 0


def _files(room: Path, pattern: str = "*.py") -> list[Path]:
    return [room] if room.is_file() else sorted(room.rglob(pattern))


if __name__ == "__main__":
    sys.exit(main())
