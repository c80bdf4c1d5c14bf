"""The house keeps its shape: who may import whom, how long things may be, what must not be written."""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.house_rules import LIBRARY_HOMES, SAME_THING, SMALL_FOR_A_REASON

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "fakedist"
MODULES = sorted(PACKAGE.rglob("*.py"))
OUTSIDE = [path for folder in ("examples", "bench", "reports") for path in sorted((ROOT / folder).rglob("*.py"))]
SHIPPED = [*MODULES, ROOT / "cli.py", *OUTSIDE]
WRITTEN = [*SHIPPED, *sorted((ROOT / "tests").rglob("*.py"))]

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL_PARAMETERS = 5

HOUSE = (ROOT / "CONTRIBUTING.md").read_text().partition("## The house")[2].partition("\n## ")[0]
DRAWING, ARROWS = re.findall(r"^```\nfakedist/\n(.*?)^```", HOUSE, re.DOTALL | re.MULTILINE)
#: Each room and module outside of rooms -> the rooms and modules that it may import besides itself and EVERYWHERE.
MAY_IMPORT = {
    room.replace("/", "."): homes.replace("/", ".").replace(",", "").split()
    for rooms, homes in re.findall(r"^  (\S+(?:, \S+)*) +-> ?(.*)$", ARROWS, re.MULTILINE)
    for room in rooms.split(", ")
}
EVERYWHERE = MAY_IMPORT.pop("any")


def half(name: str) -> set[str]:
    """The rooms of the recording or the reading half, as listed below the drawing."""
    listed = re.search(rf"The {name} half \(([^)]+)\)", HOUSE)
    assert listed is not None
    return {name.replace("/", ".") for name in re.findall(r"[\w/]+", listed[1])}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_bytes())))


@pytest.fixture(scope="module", autouse=True)
def nodes_are_not_walked_for_garbage() -> Iterator[None]:
    """The package has a million."""
    gc.disable()
    yield
    nodes_of.cache_clear()
    gc.enable()


def module_name(path: Path) -> str:
    """Dotted, below the package: "world.environ"; of a room's __init__, the room's."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


NAMES = {module_name(path) for path in MODULES}


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
    def library(self) -> str:
        return self.module.partition(".")[0]

    @property
    def target(self) -> str:
        """The imported module of the package, as `module_name` has it; empty for a library's."""
        return "" if self.library != "fakedist" else self.module.removeprefix("fakedist").lstrip(".") or "__init__"

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    functions = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in nodes_of(path):
        names = []
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports inside the package are written out in full"
            module = str(node.module)
            inner = [f"{module}.{name.name}" for name in node.names]
            names = [name if name.removeprefix("fakedist.") in NAMES else module for name in inner]
        for name in dict.fromkeys(names):
            yield Import(path, getattr(node, "lineno", 0), name, id(node) not in inside)


@functools.cache
def all_imports() -> list[Import]:
    return [found for path in MODULES for found in imports_of(path)]


def is_in(target: str, home: str) -> bool:
    return target == home or target.startswith(f"{home}.")


def room_of(name: str) -> str:
    """Each extra is a room."""
    return ".".join(name.split(".")[: 2 if name.startswith("extras.") else 1])


def offending(imports: Iterable[Import], *, unless: Callable[[Import], bool]) -> list[str]:
    return [str(each) for each in imports if not unless(each)]


def test_every_library_is_imported_in_its_own_rooms_only() -> None:
    def is_at_home(found: Import) -> bool:
        homes = LIBRARY_HOMES.get(found.library, ("",))
        return any(found.where == home or (home[-1:] in ("", "/") and found.where.startswith(home)) for home in homes)

    known = {*sys.stdlib_module_names, *LIBRARY_HOMES, "numpy", "fakedist"}
    assert offending(all_imports(), unless=is_at_home) == []
    assert offending(all_imports(), unless=lambda found: found.library in known) == []


def test_pyarrow_is_loaded_only_when_tables_are_written_or_read() -> None:
    assert offending(all_imports(), unless=lambda found: found.library != "pyarrow" or not found.at_top) == []


def test_the_driver_is_built_with_the_standard_library_alone() -> None:
    allowed = {*sys.stdlib_module_names, "fakedist"}
    driver = [one for one in all_imports() if "gpu/driver/" in one.where]
    assert driver
    assert offending(driver, unless=lambda found: found.library in allowed) == []


def test_the_drawing_has_every_room_and_every_module_outside_of_rooms() -> None:
    rooms, extras = (
        {path.parent.name for path in folder.glob("*/__init__.py")} for folder in (PACKAGE, PACKAGE / "extras")
    )
    alone = {path.stem for path in PACKAGE.glob("*.py")}
    assert set(MAY_IMPORT) == rooms | alone | {f"extras.{name}" for name in extras}
    names = [
        name for names in re.findall(r"^  ((?:\w+(?:/|\.py),? ?)+)", DRAWING, re.MULTILINE) for name in names.split()
    ]
    drawn = {name.strip(",") for name in names}
    assert {name.removesuffix("/") for name in drawn if name.endswith("/")} == rooms
    assert {name.removesuffix(".py") for name in drawn if name.endswith(".py")} == alone - {"__init__", "__main__"}


def test_rooms_import_what_the_drawing_lets_them_and_no_arrow_is_left_over() -> None:
    inside = [found for found in all_imports() if found.target]
    used: dict[str, set[str]] = {room: set() for room in MAY_IMPORT}
    for found in inside:
        used[room_of(module_name(found.path))].add(found.target)

    def may(found: Import) -> bool:
        room = room_of(module_name(found.path))
        return any(is_in(found.target, home) for home in (room, *EVERYWHERE, *MAY_IMPORT[room]))

    assert offending(inside, unless=may) == []
    arrows = [(room, home) for room, homes in MAY_IMPORT.items() for home in homes]
    left_over = [f"{room} -> {home}" for room, home in arrows if not any(is_in(one, home) for one in used[room])]
    left_over += [
        home for home in EVERYWHERE if not any(is_in(one, home) for targets in used.values() for one in targets)
    ]
    assert left_over == []


def test_the_core_is_whole_without_the_extras() -> None:
    of_extras = [found for found in all_imports() if found.target.startswith("extras.")]
    assert of_extras
    assert offending(of_extras, unless=lambda found: room_of(module_name(found.path)) == room_of(found.target)) == []


#: A property that opens another room when it is asked for: who has it, and what it opens.
DOORS = {("results.run", "report.figures.run_figures"), ("results.run", "report.content.wording")}


def imported_modules(*, at_top: bool = False) -> dict[str, set[str]]:
    """The modules of the package that each module imports, without DOORS: all, or what importing it loads."""
    found: dict[str, set[str]] = {name: set() for name in NAMES}
    for one in all_imports():
        name = module_name(one.path)
        if one.target in NAMES and (name, one.target) not in DOORS and (one.at_top or not at_top):
            found[name].add(one.target)
    return found


def reached(rooms: set[str], imported: dict[str, set[str]]) -> set[str]:
    """The modules of some rooms, and all that these import."""
    known, left = set(), [name for name in NAMES if room_of(name) in rooms]
    while left:
        if (name := left.pop()) not in known:
            known.add(name)
            left += imported[name]
    return known


def test_the_recording_half_never_imports_what_tables_and_terminals_need() -> None:
    """Not even where a function imports it, nor in what this half imports of the rest."""
    modules = reached(half("recording"), imported_modules())
    assert {"rank.main", "rundir.records"} <= modules
    unwanted = {"pandas", "pyarrow", "click", "rich", "plotly", "jinja2"}
    imports = [
        found for found in all_imports() if module_name(found.path) in modules and found.where != "rundir/tables"
    ]
    assert offending(imports, unless=lambda found: found.library not in unwanted) == []


def test_the_reading_half_never_imports_torch() -> None:
    """A function of the launcher imports the other half where a rank is forked: importing the launcher does not."""
    rooms, loaded = half("reading"), reached(half("reading"), imported_modules(at_top=True))
    assert {"results.run", "launcher.launching"} <= loaded
    imports = [
        found
        for found in all_imports()
        if room_of(name := module_name(found.path)) in rooms or (name in loaded and found.at_top)
    ]
    assert offending(imports, unless=lambda found: found.library != "torch") == []


def test_the_halves_meet_only_in_rundir() -> None:
    recording, reading = half("recording"), half("reading")
    for rooms, others in ((recording, reading), (reading, recording), ({"rundir"}, recording | reading)):
        imports = [found for found in all_imports() if room_of(module_name(found.path)) in rooms]
        met = [str(found) for found in imports if room_of(found.target) in others]
        assert [text for text in met if "fakedist.gpu.models" not in text] == []  # plain data


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
    command = [sys.executable, "-W", "error", "-c", listing]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(finished.stdout.rpartition("LOADED")[2].split()) & set(LIBRARY_HOMES)


@pytest.mark.parametrize("command", ["--help", "profile --help", "compare --help", "check --help", "--version"])
def test_help_loads_no_library_but_click(command: str) -> None:
    assert loaded_by(f"from fakedist.cli import main\nmain({command.split()})") <= {"click"}


@pytest.mark.parametrize(
    ("modules", "libraries"),
    [
        ("fakedist", set()),
        ("fakedist.launcher.launching", set()),  # the parent of a run
        ("fakedist.check.plugin", {"pytest"}),  # what every pytest on the machine loads
        ("fakedist.rank.main, fakedist.world.reroute, fakedist.record.recorder, fakedist.gpu.values.engine", {"torch"}),
    ],
)
def test_a_module_loads_what_it_needs_and_no_more(modules: str, libraries: set[str]) -> None:
    assert loaded_by(f"import {modules}") == libraries


def test_reports_are_made_without_torch() -> None:
    assert "torch" not in loaded_by("import fakedist.results.building, fakedist.report.content.run")


def named(path: Path, *more: object) -> str:
    """An offender in words: the file, and what in it."""
    return ": ".join(map(str, (path.relative_to(ROOT), *more)))


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_file_is_too_long() -> None:
    too_long = [named(path, f"{num_lines(path)} lines") for path in WRITTEN if num_lines(path) > MAX_FILE_LINES]
    assert too_long == []


def test_no_name_of_a_module_or_class_stands_for_two_things() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        where = path.relative_to(PACKAGE).as_posix()
        if path.name != "__init__.py":
            homes[path.stem].append(where)
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[f"class {node.name}"].append(where)
    repeated = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert {name: paths for name, paths in repeated.items() if name not in SAME_THING} == {}
    assert set(SAME_THING) <= set(repeated)


def test_a_small_module_with_one_importer_has_a_reason() -> None:
    importers = Counter(target for targets in imported_modules().values() for target in targets)
    small = {
        path.relative_to(PACKAGE).with_suffix("").as_posix()
        for path in MODULES
        if path.name != "__init__.py" and num_lines(path) < 80 and importers[module_name(path)] < 2
    }
    assert small == set(SMALL_FOR_A_REASON)


def num_positional_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Keyword-only parameters are free: a call names them."""
    return sum(each.arg not in ("self", "cls") for each in [*function.args.posonlyargs, *function.args.args])


def test_functions_are_short_and_take_few_positional_parameters() -> None:
    offenders = []
    for path in WRITTEN:
        for node in ast.walk(ast.parse(path.read_bytes())):  # not kept: they are many
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines, parameters = (node.end_lineno or 0) - node.lineno + 1, num_positional_parameters(node)
            if lines > MAX_FUNCTION_LINES:
                offenders.append(named(path, node.name, f"{lines} lines"))
            if ROOT / "tests" not in path.parents and parameters > MAX_POSITIONAL_PARAMETERS:
                offenders.append(named(path, node.name, f"{parameters} positional parameters"))
    assert offenders == []


def test_no_module_is_a_drawer_for_anything() -> None:
    drawers = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert [path.name for path in WRITTEN if drawers & set(path.relative_to(ROOT).with_suffix("").parts)] == []


def public_definitions(path: Path) -> Iterator[tuple[str, bool]]:
    """Names of what a module offers (module, classes, functions, methods), each with whether it is described."""
    tree = nodes_of(path)[0]
    assert isinstance(tree, ast.Module)
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
    unit, of_tests = (
        ROOT / "tests" / "unit",
        ("accuracy", "gpu_recordings", "truth"),
    )  # programs of tests/ have tests too
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
        named(path, number, line.strip())
        for path in texts
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if later.search(line)
    ]
    assert found == []


def calls_of(path: Path, *names: str) -> list[str]:
    """The calls of functions with these names, as text."""
    last = {name.rpartition(".")[2] for name in names}
    calls = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
    likely = [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) in last]
    return [named(path, call.lineno, name) for call in likely if (name := ast.unparse(call.func)) in names]


def test_only_the_command_line_prints_and_ends_the_process() -> None:
    quiet = [path for path in MODULES if path.name != "__main__.py" and room_of(module_name(path)) != "cli"]
    assert [call for path in quiet for call in calls_of(path, "print", "sys.exit", "exit", "quit")] == []


def test_the_users_logging_is_left_alone() -> None:
    touched = ("logging.basicConfig", "logging.getLogger().addHandler", "logging.disable")
    assert [call for path in MODULES for call in calls_of(path, *touched)] == []


def test_tensors_of_our_own_are_made_by_torchs_own_functions() -> None:
    """DeepSpeed's zero.Init replaces these in the module torch; names bound before the script stay torch's."""
    replaced = re.compile(r"(?<!`)\btorch\.(empty|zeros|ones|full|arange|eye|randn|tensor)\(")
    rooms = [path for room in ("gpu", "world", "rank/frameworks", "record") for path in (PACKAGE / room).rglob("*.py")]
    found = [f"{path.name}: {match[0]}" for path in rooms for match in replaced.finditer(path.read_text())]
    assert found == [], "from torch import empty"
