"""The house keeps its shape: who may import what, how long things may be, what must not be written."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.house_rules import EVERYWHERE, LIBRARY_HOMES, MAY_IMPORT, SAME_CLASS, SAME_THING, SMALL_FOR_A_REASON

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "fakedist"
MODULES = sorted(PACKAGE.rglob("*.py"))
SHIPPED = [
    *MODULES,
    ROOT / "cli.py",
    *sorted((ROOT / "examples").rglob("*.py")),
    *sorted((ROOT / "bench").rglob("*.py")),
    *sorted((ROOT / "reports").rglob("*.py")),
]
WRITTEN = [*SHIPPED, *sorted((ROOT / "tests").rglob("*.py"))]

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL_PARAMETERS = 5


@dataclass(frozen=True)
class Import:
    path: Path
    line: int
    module: str
    at_top: bool

    @property
    def where(self) -> str:
        """The importing module inside the package, with slashes: "world/environ"."""
        return self.path.relative_to(PACKAGE).with_suffix("").as_posix()

    @property
    def target(self) -> str:
        """The imported module inside the package, as in `where`."""
        return self.module.partition(".")[2].replace(".", "/")

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_bytes())
    inside_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        at_top = id(node) not in inside_functions
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(path, node.lineno, name.name, at_top)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports inside the package are written out in full"
            module = node.module or ""
            # `from fakedist import launcher` names a module; from anywhere else what is imported may be anything.
            names = [f"fakedist.{name.name}" for name in node.names] if module == "fakedist" else [module]
            for name in names:
                yield Import(path, node.lineno, name, at_top)


ALL_IMPORTS = [found for path in MODULES for found in imports_of(path)]


def test_every_library_is_imported_in_its_own_rooms_only() -> None:
    strays = [
        str(found)
        for found in ALL_IMPORTS
        if (homes := LIBRARY_HOMES.get(found.module.partition(".")[0])) is not None
        and not any(found.where == home or (home.endswith("/") and found.where.startswith(home)) for home in homes)
    ]
    assert strays == []


def test_pyarrow_is_loaded_only_when_tables_are_written_or_read() -> None:
    assert [str(found) for found in ALL_IMPORTS if found.module.startswith("pyarrow") and found.at_top] == []


def test_nothing_else_from_outside_is_imported() -> None:
    known = {*sys.stdlib_module_names, *LIBRARY_HOMES, "numpy", "fakedist"}
    assert [str(found) for found in ALL_IMPORTS if found.module.partition(".")[0] not in known] == []


def test_the_driver_is_built_with_the_standard_library_alone() -> None:
    allowed = {*sys.stdlib_module_names, "fakedist"}
    found = [found for found in ALL_IMPORTS if found.where.startswith("gpu/driver/")]
    assert found
    assert [str(each) for each in found if each.module.partition(".")[0] not in allowed] == []


def test_rooms_import_only_the_rooms_they_may() -> None:
    strays = []
    for found in ALL_IMPORTS:
        if found.module.partition(".")[0] != "fakedist":
            continue
        room, target = found.where.partition("/")[0], found.target
        top = target.partition("/")[0]
        is_public_name = top and not (PACKAGE / top).exists() and not (PACKAGE / f"{top}.py").exists()
        may = any(_is_in(target, home) for home in (room, *EVERYWHERE, *MAY_IMPORT[room]))
        if not target or may or is_public_name:
            continue
        strays.append(str(found))
    assert strays == []


def _is_in(target: str, home: str) -> bool:
    return target == home or target.startswith(f"{home}/")


def test_every_room_is_drawn_and_no_right_to_import_is_left_over() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    alone = {path.stem for path in PACKAGE.glob("*.py")}
    assert set(MAY_IMPORT) == rooms | alone
    house = (ROOT / "CONTRIBUTING.md").read_text().partition("```\nfakedist/\n")[2].partition("```")[0]
    drawn = {name for line in house.splitlines() for name in re.findall(r"^  ((?:\w+(?:/|\.py),? ?)+)", line)}
    named_there = {each.strip(" ,") for names in drawn for each in names.split()}
    assert {name.removesuffix("/") for name in named_there if name.endswith("/")} == rooms
    assert {name.removesuffix(".py") for name in named_there if name.endswith(".py")} == alone - {
        "__init__",
        "__main__",
    }
    used = {room: {found.target for found in ALL_IMPORTS if _is_of(found, room)} for room in MAY_IMPORT}
    left_over = {
        room: [home for home in may if not any(_is_in(target, home) for target in used[room])]
        for room, may in MAY_IMPORT.items()
    }
    assert {room: homes for room, homes in left_over.items() if homes} == {}


def _is_of(found: Import, room: str) -> bool:
    return found.where.partition("/")[0] == room and found.module.startswith("fakedist.")


def test_record_side_and_read_side_meet_only_in_rundir() -> None:
    record_side = {"rank", "world", "gpu", "record"}
    read_side = {"cost_model", "analysis", "results", "report", "export", "check", "sweep"}
    for room in record_side:
        assert not read_side & set(MAY_IMPORT[room])
    for room in read_side:
        assert not record_side & set(MAY_IMPORT[room])
    assert MAY_IMPORT["rundir"] == ()


#: A property that opens another room when it is asked for: who has it, and what it opens.
DOORS = {("fakedist.results.run", "fakedist.report.figures.run_figures")}


def imported_modules() -> dict[str, set[str]]:
    """The modules of the package that each module imports, in functions and for types too, without DOORS."""

    def name_of(path: Path) -> str:
        return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    names = {name_of(path) for path in MODULES}
    found: dict[str, set[str]] = {name: set() for name in names}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom):
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                found[name_of(path)] |= {each if each in names else str(node.module) for each in inside}
            elif isinstance(node, ast.Import):
                found[name_of(path)] |= {alias.name for alias in node.names}
    return {name: {each for each in found[name] & names if (name, each) not in DOORS} for name in names}


def test_no_modules_import_each_other_in_a_circle() -> None:
    left = imported_modules()
    while leaves := {name for name, targets in left.items() if not targets & set(left)}:
        left = {name: targets for name, targets in left.items() if name not in leaves}
    while unused := set(left) - {target for targets in left.values() for target in targets}:
        left = {name: targets for name, targets in left.items() if name not in unused}
    assert sorted(left) == []


def loaded_by(statements: str) -> set[str]:
    """The third-party libraries that a fresh interpreter has loaded after `statements`."""
    listing = f"{statements}\nimport sys\nprint('LOADED', *{{name.partition('.')[0] for name in sys.modules}})"
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", listing],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(finished.stdout.rpartition("LOADED")[2].split()) & set(LIBRARY_HOMES)


@pytest.mark.parametrize(
    "command", [["--help"], ["profile", "--help"], ["compare", "--help"], ["check", "--help"], ["--version"]]
)
def test_help_loads_no_library_but_click(command: list[str]) -> None:
    assert loaded_by(f"from fakedist.cli import main\nmain({command!r})") <= {"click"}


def test_the_parent_of_a_run_never_loads_torch() -> None:
    assert loaded_by("import fakedist.launcher.launching") == set()


def test_a_pytest_that_finds_the_plugin_pays_for_nothing() -> None:
    assert loaded_by("import fakedist.check.plugin") <= {"pytest"}


def test_the_package_itself_loads_nothing() -> None:
    assert loaded_by("import fakedist") == set()


def test_the_recording_half_loads_torch_and_nothing_of_the_reading_half() -> None:
    statements = (
        "import fakedist.rank.main, fakedist.world.reroute, fakedist.record.recorder, fakedist.gpu.values.engine"
    )
    assert loaded_by(statements) == {"torch"}


def test_reports_are_made_without_torch() -> None:
    statements = "import fakedist.results.building, fakedist.report.text.run_report, fakedist.report.text.run_report"
    assert "torch" not in loaded_by(statements)


def named(path: Path, *more: object) -> str:
    """An offender in words: the file, and what in it."""
    return ": ".join(map(str, (path.relative_to(ROOT), *more)))


def test_no_file_is_too_long() -> None:
    too_long = [
        named(path, f"{lines} lines")
        for path in WRITTEN
        if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES
    ]
    assert too_long == []


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_no_name_of_a_module_stands_for_two_things() -> None:
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        if path.name != "__init__.py":
            homes.setdefault(path.stem, []).append(path.relative_to(PACKAGE).as_posix())
    assert {name: paths for name, paths in homes.items() if len(paths) > 1 and name not in SAME_THING} == {}
    assert [name for name in SAME_THING if len(homes.get(name, ())) < 2] == []


def test_no_name_of_a_class_stands_for_two_things() -> None:
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    assert {name: paths for name, paths in homes.items() if len(paths) > 1 and name not in SAME_CLASS} == {}
    assert [name for name in SAME_CLASS if len(homes.get(name, ())) < 2] == []


def test_a_small_module_with_one_importer_has_a_reason() -> None:
    importers: dict[str, set[str]] = {}
    for importer, targets in imported_modules().items():
        for target in targets:
            importers.setdefault(target, set()).add(importer)
    small = {
        path.relative_to(PACKAGE).with_suffix("").as_posix()
        for path in MODULES
        if path.name != "__init__.py"
        and len(path.read_text().splitlines()) < 80
        and len(importers.get(".".join(path.relative_to(ROOT).with_suffix("").parts), ())) < 2
    }
    assert small == set(SMALL_FOR_A_REASON)


def test_no_function_is_too_long() -> None:
    too_long = [
        named(path, function.name, f"{lines} lines")
        for path in WRITTEN
        for function in functions_of(path)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert too_long == []


def num_positional_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Keyword-only parameters are free: a call names them."""
    return sum(each.arg not in ("self", "cls") for each in [*function.args.posonlyargs, *function.args.args])


def test_no_function_takes_too_many_positional_parameters() -> None:
    too_many = [
        named(path, function.name, f"{number} positional parameters")
        for path in SHIPPED
        for function in functions_of(path)
        if (number := num_positional_parameters(function)) > MAX_POSITIONAL_PARAMETERS
    ]
    assert too_many == []


def test_no_module_is_a_drawer_for_anything() -> None:
    drawers = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert [path.name for path in WRITTEN if drawers & set(path.relative_to(ROOT).with_suffix("").parts)] == []


def public_definitions(path: Path) -> Iterator[tuple[str, bool]]:
    """Names of what a module offers (module, classes, functions, methods), each with whether it is described."""
    tree = ast.parse(path.read_bytes())
    yield "module", ast.get_docstring(tree) is not None
    scopes: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    while scopes:
        prefix, scope = scopes.pop()
        for node in scope.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name[0] == "_":
                continue
            if any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list):
                continue  # its implementation is described
            yield prefix + node.name, ast.get_docstring(node) is not None
            if isinstance(node, ast.ClassDef):
                scopes.append((f"{node.name}.", node))


def test_unit_tests_stand_where_the_modules_that_they_test_do() -> None:
    homes: dict[str, set[str]] = {}
    for path in MODULES:
        homes.setdefault(path.stem, set()).add(path.relative_to(PACKAGE).parent.as_posix())
    unit, of_tests = ROOT / "tests" / "unit", ("accuracy", "gpu_recordings")  # programs of tests/ have tests too
    offenders = []
    for path in sorted(unit.rglob("test_*.py")):
        room, module = path.relative_to(unit).parent.as_posix(), path.stem.removeprefix("test_")
        if room not in of_tests and (not (PACKAGE / room).is_dir() or room not in homes.get(module, {room})):
            offenders.append(f"{path.relative_to(ROOT)}: {module} is in {sorted(homes.get(module, ['no room']))}")
    assert offenders == []


def test_everything_public_has_a_docstring() -> None:
    bare = [named(path, name) for path in SHIPPED for name, described in public_definitions(path) if not described]
    assert bare == []


def test_nothing_is_left_for_later() -> None:
    later = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    texts = [*WRITTEN, *PACKAGE.rglob("*.c"), *PACKAGE.rglob("*.h"), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if later.search(line)
    ]
    assert found == []


def calls_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def test_only_the_command_line_prints_and_ends_the_process() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} calls {name}"
        for path in MODULES
        if path.name != "__main__.py" and path.relative_to(PACKAGE).parts[0] != "cli"
        for line, name in calls_of(path)
        if name in ("print", "sys.exit", "exit", "quit")
    ]
    assert found == []


def test_tensors_of_our_own_are_made_by_torchs_own_functions() -> None:
    """DeepSpeed's zero.Init replaces these in the module torch; names bound before the script stay torch's."""
    replaced = re.compile(r"(?<!`)\btorch\.(empty|zeros|ones|full|arange|eye|randn|tensor)\(")
    rooms = [path for room in ("gpu", "world", "rank/frameworks", "record") for path in (PACKAGE / room).rglob("*.py")]
    found = [f"{path.name}: {match[0]}" for path in rooms for match in replaced.finditer(path.read_text())]
    assert found == [], "from torch import empty"


def test_the_users_logging_is_left_alone() -> None:
    touched = ("logging.basicConfig", "logging.getLogger().addHandler", "logging.disable")
    found = [f"{path.name}:{line}" for path in MODULES for line, name in calls_of(path) if name in touched]
    assert found == []
