"""Finds the parameters through which a kernel writes global memory, from its PTX.

There Triton's kernels have no helpers, tuples or aliases of modules any more, and a parameter for each of the launch's.
A register points where the registers point that it is computed from, however the program branches. An address that was
loaded from global memory may be anywhere.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

#: Comments, lines of the source, and labels.
_COMMENT = re.compile(r"//[^\n]*|^\s*\.loc\b[^\n]*|^\s*[\w$]+:(?!:)", re.MULTILINE)
#: Where one instruction ends and another begins. A brace on a line of its own is a function's or inline assembly's.
_BETWEEN = re.compile(r";|^\s*[{}]", re.MULTILINE)
#: An instruction: perhaps a predicate, then its opcode and its operands.
_INSTRUCTION = re.compile(r"\s*(?:\{\s*)?(?:@!?[%\w$]+\s+)?([a-z]\w*(?:[.:]+\w+)*)\s+([^\s].*)", re.DOTALL)
#: Registers, parameters and variables; predicates point nowhere.
_NAME = re.compile(r"(?<![\w$%.])(?!%(?:\d+_)?p\d)%?[\w$]*[A-Za-z_$][\w$]*")
_ADDRESS = re.compile(r"\[([^\]]*)\]")
#: What an instruction gives a value to: names in braces, or one name.
_DESTINATION = re.compile(r"\s*(\{[^}]*\}|[^,\[{]*)")
_STORES = re.compile(r"(?:st|atom|red|multimem|sust|sured|tensormap|stmatrix)\.(?!ld_reduce)")
#: Copies between global memory and a block's own, in which the target's space comes first.
_BULK = re.compile(r"(?:multimem\.)?cp\.(?:reduce\.)?async\.bulk\.")
_OWN_SPACE = re.compile(r"\.(?:shared|local|param|const)\b|^[sl][td]matrix\.")
#: Names that stand for a block's own memory, global memory, and what the descriptors point to that a block makes.
_OWN, _GLOBAL, _DESCRIBED = "own memory", "global memory", "described memory"
#: The root of an address that comes from global memory.
_LOADED = -1

_Roots = frozenset[int]


class _Flow(NamedTuple):
    """Where the values of ``targets`` come from."""

    targets: Iterable[str]
    sources: Iterable[str]


def written_parameters(ptx: str, kernel: str) -> list[bool] | None:
    """Whether a kernel writes through each of its parameters; None if it may write elsewhere, too."""
    entry = re.search(rf"\.entry\s+{re.escape(kernel)}\s*\(([^)]*)\)", ptx)
    if entry is None:
        return None
    roots: defaultdict[str, _Roots] = defaultdict(frozenset)
    parameters = re.findall(r"([\w$]+)(?:\[\d*\])?\s*(?:,|$)", entry[1].strip())
    for position, parameter in enumerate(parameters):
        roots[parameter] = frozenset({position})
    roots[_GLOBAL] = frozenset({_LOADED})
    instructions = list(_instructions(ptx))
    _follow(roots, [flow for opcode, operands in instructions for flow in _flows(opcode, operands)])
    written = set[int]()
    for opcode, operands in instructions:
        for names in _written(opcode, operands):
            reached = _reached(roots, names)
            if reached == {_LOADED} and not opcode.startswith("call"):
                return None
            written |= reached
    return [position in written for position in range(len(parameters))]


def _instructions(ptx: str) -> Iterator[tuple[str, str]]:
    """Opcodes and operands, of functions that the kernel may call, too. Each function has registers of its own."""
    for number, function in enumerate(re.split(r"\.func\b", _COMMENT.sub("", ptx))):
        for text in _BETWEEN.split(function):
            if (match := _INSTRUCTION.match(text)) is not None:
                yield match[1], match[2].replace("%", f"%{number}_")


def _written(opcode: str, operands: str) -> list[list[str]]:
    """The names that make up each address that an instruction writes in global memory."""
    if opcode.startswith("call"):
        return [[name] for name in _NAME.findall(operands)]
    is_copy = _BULK.match(opcode) is not None
    is_global = ".global.shared" in opcode if is_copy else not _OWN_SPACE.search(opcode)
    address = _ADDRESS.search(operands)
    if address is None or not is_global or not (is_copy or _STORES.match(opcode)):
        return []
    names = _NAME.findall(address[1])[:1]  # coordinates within a tensor come behind its descriptor
    return [names, [_DESCRIBED]] if ".tensor." in opcode else [names]


def _flows(opcode: str, operands: str) -> list[_Flow]:
    address = _ADDRESS.search(operands)
    inside = _NAME.findall(address[1]) if address else []
    if opcode.startswith("tensormap.replace") and address:
        described = _NAME.findall(operands[address.end() :]) if "global_address" in opcode else []
        return [_Flow([_DESCRIBED], described)]
    if opcode.startswith(("st.", "stmatrix.")) and address:
        to = inside if ".param" in opcode else [_OWN] if _OWN_SPACE.search(opcode) or ".global" not in opcode else []
        return [_Flow(to, _NAME.findall(operands[address.end() :]))]
    if _BULK.match(opcode) or opcode.startswith("cp.async."):
        return [_Flow([_OWN], [_GLOBAL])]
    destination = _DESTINATION.match(operands)
    targets = _NAME.findall(destination[1]) if destination else []
    if opcode.startswith("call"):
        targets = _NAME.findall(operands)
    if opcode.startswith(("ld.", "ldu.", "ldmatrix.", "atom.", "multimem.")):
        if ".param" in opcode:
            return [_Flow(targets, inside)]
        return [_Flow(targets, [_GLOBAL] if ".global" in opcode else [_OWN, _GLOBAL])]
    sources = _NAME.findall(operands[destination.end() :]) if destination else []
    return [_Flow(targets, sources)]


def _reached(roots: defaultdict[str, _Roots], names: Iterable[str]) -> _Roots:
    return frozenset[int]().union(*(roots[name] for name in names))


def _follow(roots: defaultdict[str, _Roots], flows: list[_Flow]) -> None:
    """Follow pointers until no more are found: loops carry them back."""
    changed = True
    while changed:
        changed = False
        for targets, sources in flows:
            reached = _reached(roots, sources)
            for target in targets:
                if not reached <= roots[target]:
                    roots[target] |= reached
                    changed = True
