"""Interprets the text of a range, fakedist's or another tool's: a step, a phase, a layer or an operation."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fakedist.rundir.trace_records import (
    CALL_RANGE,
    LAYER_RANGE,
    OWN_RANGE,
    PHASE_RANGE,
    SCRIPT_RANGE,
    SCRIPT_RANGE_END,
    STEP_RANGE,
)

IGNORED, STEP, PHASE, LAYER, OPERATION, NODE, DERIVATIVE, CALL, SCRIPTS, SCRIPTS_END = range(10)
#: torch.autograd.profiler.emit_nvtx writes "aten::mm, seq = 12, op_id = 7, sizes = [...]".
TAILS = (", seq = ", ", op_id = ", ", sizes = ", ", input_op_ids = ")
_SEQUENCE = re.compile(r", seq = (\d+)")
_NODE = "autograd::engine::evaluate_function: "
_STEP = re.compile(
    r"(?:global[ _-]?|train(?:ing)?[ _-]?)?(?:step|iter|iteration|batch|ProfilerStep)[ _:#=-]*(\d+)(?:/\d+)?",
    re.IGNORECASE,
)
_DERIVATIVE = re.compile(r"\w+Backward\d*$|torch::autograd::")
_OPERATION = re.compile(r"\w+::[\w<]|nccl\w*:|Optimizer\.zero_grad#|(?:detach|CompiledFunction|Torch-Compiled)\b")
_PHASES = (
    ("optimizer", re.compile(r"optimi[sz]er|^optim\b|\boptim[._-]?step|^Adam|^SGD", re.IGNORECASE)),
    ("backward", re.compile(r"backward|(?:^|[\W_])bwd(?:[\W_]|$)", re.IGNORECASE)),
    ("forward", re.compile(r"forward|(?:^|[\W_])fwd(?:[\W_]|$)", re.IGNORECASE)),
)
#: A range that is only a phase: it consists of the phase's words and these.
_FILLERS = re.compile(
    r"(?:forward|backward|fwd|bwd|optimi[sz]er|optim|step|pass|compute|func|model|loss|micro|batch|\d|[\W_])+",
    re.IGNORECASE,
)
#: Domains of libraries, whose ranges are not the program's layers.
_LIBRARY = re.compile(r"nccl|cccl|cub\b|thrust|cu(?:blas|dnn|sparse|solver|fft|tensor|da)|nvshmem|libcu", re.IGNORECASE)


@dataclass(frozen=True)
class Meaning:
    """The meaning of a range's text.

    Attributes:
        kind: STEP, PHASE, LAYER, OPERATION, NODE (autograd runs a node), DERIVATIVE (that node's own function), CALL
            (one of fakedist's collectives), SCRIPTS and SCRIPTS_END (marks where a range of the script begins and ends)
            or IGNORED.
        name: The name of the layer, operation or range; empty without one.
        phase: forward, backward or optimizer, if the text names it. fakedist's own ranges can name any phase.
        number: The number of the step, call or range; -1 without one.
        is_ours: Whether fakedist emitted the range.
    """

    kind: int
    name: str = ""
    phase: str = ""
    number: int = -1
    is_ours: bool = False


def without_numbers(text: str) -> tuple[str, int]:
    """A range's text without the parts that make each one unique, and autograd's sequence number; -1 without one."""
    found = _SEQUENCE.search(text) if ", " in text else None
    for tail in TAILS:
        if tail in text:
            text = text[: text.index(tail)]
            break
    return text, int(found[1]) if found else -1


def meaning(text: str, domain: str = "") -> Meaning:
    """The meaning of a range, from its text without numbers and the name of its domain."""
    if text.startswith(OWN_RANGE):
        return _own(text)
    if domain and _LIBRARY.match(domain):
        return Meaning(OPERATION, text)
    if text.startswith(_NODE):
        return Meaning(NODE, text.removeprefix(_NODE), "backward")
    if _DERIVATIVE.match(text):
        return Meaning(DERIVATIVE, text, "backward")
    if step := _STEP.fullmatch(text.strip()):
        return Meaning(STEP, number=int(step[1]))
    phase = _phase(text)
    if text.startswith("Optimizer.step#"):
        return Meaning(PHASE, phase="optimizer")
    if _OPERATION.match(text):
        return Meaning(OPERATION, text)
    if _FILLERS.fullmatch(text) and text.strip():
        return Meaning(PHASE, phase=phase) if phase else Meaning(IGNORED)
    return Meaning(LAYER, text, phase) if text.strip() else Meaning(IGNORED)


def _own(text: str) -> Meaning:
    if text.startswith(SCRIPT_RANGE):
        number, _, name = text.removeprefix(SCRIPT_RANGE).partition(":")
        return Meaning(SCRIPTS, name, number=int(number), is_ours=True) if number.isdecimal() else Meaning(IGNORED)
    for kind, prefix in ((STEP, STEP_RANGE), (CALL, CALL_RANGE), (SCRIPTS_END, SCRIPT_RANGE_END)):
        if text.startswith(prefix) and text.removeprefix(prefix).isdecimal():
            return Meaning(kind, number=int(text.removeprefix(prefix)), is_ours=True)
    if text.startswith(PHASE_RANGE):
        return Meaning(PHASE, phase=text.removeprefix(PHASE_RANGE), is_ours=True)
    if text.startswith(LAYER_RANGE):
        return Meaning(LAYER, text.removeprefix(LAYER_RANGE), is_ours=True)
    return Meaning(IGNORED)


def _phase(text: str) -> str:
    found = [phase for phase, words in _PHASES if words.search(text)]
    return found[0] if len(found) == 1 else ""  # "forward-backward" is neither
