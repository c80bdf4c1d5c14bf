"""The house of the driver's C sources: layers without circles, as virtual_gpu.h draws them, and names by module."""

from __future__ import annotations

import re
from pathlib import Path

from fakedist.gpu.driver.build import SOURCE_DIRECTORY, answered_names, find_cuda

FILES = sorted(path for path in SOURCE_DIRECTORY.iterdir() if path.suffix in (".c", ".h"))
MODULES = {path.stem for path in FILES}
#: Where a module's functions do not begin with its name.
PREFIXES = {"virtual_gpu": "gpu"}


def heights() -> dict[str, int]:
    """Each module's layer, as drawn at the head of virtual_gpu.h; 0 is the lowest."""
    drawing = (SOURCE_DIRECTORY / "virtual_gpu.h").read_text().split("*/", 1)[0]
    rows = re.findall(r"^ \* +(\d+) ((?:\w+ )*\w+)", drawing, re.MULTILINE)
    return {module: int(number) for number, modules in rows for module in modules.split()}


def includes(path: Path) -> list[str]:
    """Modules whose headers a file includes, in its order."""
    return re.findall(r'^ *# *include "(\w+)\.h"', path.read_text(), re.MULTILINE)


def code(path: Path) -> str:
    """A file without its comments and texts."""
    return re.sub(r'/\*.*?\*/|"(?:\\.|[^"\\])*"', " ", path.read_text(), flags=re.DOTALL)


def test_every_module_is_drawn() -> None:
    assert set(heights()) == MODULES


def test_a_module_uses_only_the_layers_below_its_own() -> None:
    """So there is no circle either."""
    height = heights()
    found = [
        f"{path.name} includes {other}.h"
        for path in FILES
        for other in includes(path)
        if other != path.stem and height[other] >= height[path.stem]
    ]
    assert not found, "\n".join(found)


def test_a_source_includes_its_own_header_first() -> None:
    found = [
        f"{path.name} includes {[*includes(path), None][0]}.h first"
        for path in FILES
        if path.suffix == ".c" and path.with_suffix(".h").exists() and includes(path)[:1] != [path.stem]
    ]
    assert not found, "\n".join(found)


def test_functions_of_other_modules_are_declared_in_headers_alone() -> None:
    """Without this, a source could declare a function of a higher layer itself."""
    declaration = re.compile(r"^ *extern\b.*|^(?!static|typedef)(?:\w+[ *]+)+\w+\([^{}()]*\);", re.MULTILINE)
    sources = (path for path in FILES if path.suffix == ".c")
    found = [f"{path.name}: {words}" for path in sources for words in declaration.findall(code(path))]
    assert not found, "\n".join(found)


def test_a_modules_functions_begin_with_its_name() -> None:
    found = []
    for path in (path for path in FILES if path.suffix == ".h"):
        name = PREFIXES.get(path.stem, path.stem)
        prefixes = tuple(f"{each}_" for each in (name, name.removesuffix("s"), name.removesuffix("es")))
        declared = re.findall(r"^(?:LOCAL|static inline) [\w\s*]*?(\w+)\(", code(path), re.MULTILINE)
        found += [f"{path.name}: {function}" for function in declared if not function.startswith(prefixes)]
        exported = re.findall(r"^API [\w\s*]*?(\w+)\(", code(path), re.MULTILINE)
        found += [
            f"{path.name}: {function}" for function in exported if function not in answered_names(find_cuda().include)
        ]
    assert not found, "\n".join(found)
