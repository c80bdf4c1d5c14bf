"""The scripts and figures that a page carries: its own modules joined into one, plotly.js, and plotly's JSON.

A page's policy allows exactly these two scripts, by their hashes. plotly.js travels inside the page, compressed; pages
that lie next to each other can share one file of it instead.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import plotly.graph_objects as go

_HERE = Path(__file__).parent
SCRIPTS = _HERE / "scripts"
_PLOTLY = _HERE / "plotly" / "plotly.min.js.gz"
_IMPORT = re.compile(r"^import \{([^}]*)\} from '\./([a-z_]+)\.js';\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const)\*? ([\w$]+))", re.MULTILINE)
_OTHER = re.compile(r"^\s*(?:import|export)\b.*$", re.MULTILINE)
#: plotly.js makes one empty style element, into which it puts its rules.
_EMPTY = hashlib.sha256(b"")


@dataclass(frozen=True)
class PageScripts:
    """The scripts and the policy of a page: plotly.js in it, compressed, as base64 text, or the name of its file."""

    own: str
    policy: str
    plotly: str
    plotly_file: str


def page_scripts(entry: str, style: str, plotly_file: str = "") -> PageScripts:
    """The scripts of a page. ``plotly_file``, next to the page, has plotly.js; empty to have it in the page."""
    own = joined(entry)
    compressed = _PLOTLY.read_bytes()
    # Chromium does not load a script by its hash from a file, so pages that share one allow what lies next to them.
    library = "'self'" if plotly_file else _source(hashlib.sha256(plotly_text()))
    policy = {
        "default-src": "'none'",
        "script-src": f"{_source(hashlib.sha256(own.encode()))} {library}",
        "style-src-elem": f"{_source(hashlib.sha256(style.encode()))} {_source(_EMPTY)}",
        "style-src-attr": "'unsafe-inline'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return PageScripts(
        own=own,
        policy="; ".join(f"{name} {value}" for name, value in policy.items()),
        plotly="" if plotly_file else base64.b64encode(compressed).decode(),
        plotly_file=plotly_file,
    )


def _source(digest: hashlib._Hash) -> str:
    return f"'sha256-{base64.b64encode(digest.digest()).decode()}'"


@lru_cache
def plotly_text() -> bytes:
    """plotly.js itself: a bundle of the parts that the charts need (``make plotly``)."""
    return gzip.decompress(_PLOTLY.read_bytes())


@lru_cache
def joined(entry: str) -> str:
    """One script from a module and all that it imports, each in a scope of its own.

    Raises:
        ValueError: Modules import each other, or one is written in a form that this cannot join.
    """
    order: list[str] = []
    bodies: dict[str, str] = {}
    _visit(entry, (), bodies, order)
    modules = "\n".join(bodies[name] for name in order)
    return f"(() => {{\n'use strict';\n{modules}\n}})();\n"


def _visit(name: str, above: tuple[str, ...], bodies: dict[str, str], order: list[str]) -> None:
    if name in above:
        raise ValueError(f"modules import each other: {' -> '.join([*above, name])}")
    if name in bodies:
        return
    text = (SCRIPTS / f"{name}.js").read_text("utf-8")
    for _, imported in _IMPORT.findall(text):
        _visit(imported, (*above, name), bodies, order)
    bodies[name] = _module(name, text)
    order.append(name)


def _module(name: str, text: str) -> str:
    exported = _EXPORT.findall(text)
    body = _EXPORT.sub("", _IMPORT.sub(_taken, text))
    if match := _OTHER.search(body):
        raise ValueError(f"{name}.js cannot be joined: {match[0].strip()}")
    return f"const module_{name} = (() => {{\n{body}return {{ {', '.join(exported)} }};\n}})();"


def _taken(match: re.Match[str]) -> str:
    names = ", ".join(name.strip().replace(" as ", ": ") for name in match[1].split(",") if name.strip())
    return f"const {{ {names} }} = module_{match[2]};\n"


_NO_TITLE = 12  # pixels above a chart


def figure_object(figure: go.Figure) -> object:
    """A figure as JSON, without its template and title: the page has its own colours and headings."""
    plain = json.loads(figure.to_json())
    for name in ("template", "title"):
        plain["layout"].pop(name, None)
    plain["layout"]["margin"]["t"] = _NO_TITLE
    return plain
