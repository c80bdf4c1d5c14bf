"""Reads what the stacks of a memory snapshot show of each event: its phase, its purpose, the modules around it.

Autograd runs most of a backward in a thread of its own, which has no frames of Python. Without frames of C++ either, an
event between a forward and an optimizer's step that has no stack is then one of the backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fakedist.analysis.stack_lines import BACKWARD as BACKWARD_FRAME
from fakedist.analysis.stack_lines import NATIVE
from fakedist.rundir.rows import FrameRow

#: Kinds of evidence, strongest last: none, which leaves an event with the one before it; a stack without frames of
#: Python; code outside of modules; and the phases.
SILENT, BLANK, UNKNOWN, FORWARD, BACKWARD, OPTIMIZER = range(6)
_ENGINE = re.compile(r"torch::autograd::(?:Engine::|Node::operator\(\)|python::PythonEngine::)")
_RUNS_BACKWARD = re.compile(r"/torch/autograd/(?:graph|__init__)\.py$|/torch/_tensor\.py$")
_RUN_FUNCTIONS = frozenset(("_engine_run_backward", "backward", "grad", "_make_grads"))
#: Where a thread of autograd enters Python: custom functions, and a checkpoint's forward.
_ENTERS_PYTHON = ("/torch/autograd/function.py", "/torch/utils/checkpoint.py")
_OPTIMIZERS = re.compile(
    r"/torch/optim/|/(?:apex|bitsandbytes|deepspeed|megatron|transformer_engine)/.*optim", re.IGNORECASE
)
_NO_STEP = frozenset(("zero_grad", "__init__", "load_state_dict", "state_dict", "add_param_group", "_lazy_init"))
_MODULE = "/torch/nn/modules/module.py"
_CALLS = frozenset(("_call_impl", "_wrapped_call_impl", "__call__", "inner", "_slow_forward"))
_MAKES_PARAMETERS = re.compile(r"/torch/nn/(?:modules/|parameter\.py|utils/init|init\.py)")
_MAKERS = frozenset(("__init__", "reset_parameters", "_apply", "convert", "__new__", "to_empty", "cuda", "to"))
_COMMUNICATES = re.compile(
    r"c10d::|ProcessGroupNCCL|/torch/distributed/(?:distributed_c10d|_functional_collectives)\.py|"
    r"/torch/distributed/fsdp/.*(?:_collectives|_param_group|_flat_param|_unshard)|/torch/nn/parallel/distributed\.py"
)
#: Where FSDP allocates whole parameters, for as long as a layer runs.
_GATHERS = re.compile(
    r"/(?:_fsdp_param|_flat_param)\.py (?:alloc_all_gather_outputs|init_unsharded_param|_alloc_padded)"
)
_WORKSPACE = re.compile(r"CUDABlas\w*(?:Workspace|Handle)|ChosenWorkspaceSize|[Cc]ublas\w*[Ww]orkspace|getWorkspace")
_OPERATION = re.compile(r"^at::_ops::(\w+)::call\(")
#: Functions of Python that call an operation of their name.
_FUNCTION = re.compile(r"/torch/nn/(?:functional\.py (?!_)(\w+)|modules/(linear)\.py forward)$")
#: What converts an operation's inputs under autocast; outside of it in a stack is the operation that was called.
_AUTOCAST = "at::autocast::cached_cast("
_NODE = re.compile(r"torch::autograd::(?:generated::)?(\w+Backward\d*|AccumulateGrad)(?:::|\b)")


class ModuleCall(NamedTuple):
    """A module's forward in a stack.

    Attributes:
        site: The line that called the module: "model:253".
        own: Stem of the file of its forward.
        line: The line of its forward that runs.
    """

    site: str
    own: str
    line: int


@dataclass(frozen=True)
class StackEvidence:
    """The evidence of a stack.

    Attributes:
        kind: BLANK, UNKNOWN, FORWARD, BACKWARD or OPTIMIZER.
        modules: The calls of modules, outermost first.
        is_recompute: Backward runs a checkpointed forward again.
        makes_parameters: It makes or moves parameters.
        zeroes: It is in an optimizer's or a module's zero_grad.
        purpose: parameter (gathered by FSDP), workspace or communication, if it shows; else empty.
        operation: The autograd node that runs, by its name in C++, else aten::_to_copy where autocast converts
            an input, else the operation that was called, such as aten::index_Tensor; without frames of C++ the
            function of torch.nn.functional, such as aten::cross_entropy, else empty.
    """

    kind: int
    modules: tuple[ModuleCall, ...] = ()
    is_recompute: bool = False
    makes_parameters: bool = False
    zeroes: bool = False
    purpose: str = ""
    operation: str = ""


NO_STACK = StackEvidence(BLANK)


def read_evidence(frames: Sequence[FrameRow], stacks: Sequence[Sequence[int]]) -> list[StackEvidence]:
    """The evidence of each stack, whose frames are rows of ``frames``, innermost first.

    A forward's frames, below those of the backward of what it made, show nothing of the backward.
    """
    facts = [_FrameFacts.of(frame) for frame in frames]
    own = (takewhile(lambda number: frames[number] != BACKWARD_FRAME, stack) for stack in stacks)
    return [_of_stack([facts[number] for number in stack]) for stack in own]


class _FrameFacts(NamedTuple):
    frame: FrameRow
    is_python: bool
    is_engine: bool
    is_optimizer: bool
    is_call: bool
    makes_parameters: bool
    purpose: str
    node: str
    operation: str
    is_autocast: bool

    @classmethod
    def of(cls, frame: FrameRow) -> _FrameFacts:
        filename, line, function = frame
        text = f"{filename} {function}"
        is_python = not NATIVE.search(filename) and bool(line)
        node = None if is_python else _NODE.search(function)
        operation = _FUNCTION.search(text) if is_python else _OPERATION.search(function)
        called = next(filter(None, operation.groups()), "") if operation else ""
        is_autocast = function.startswith(_AUTOCAST)
        runs = bool(_RUNS_BACKWARD.search(filename)) and function in _RUN_FUNCTIONS
        purpose = "parameter" if _GATHERS.search(text) else "communication" if _COMMUNICATES.search(text) else ""
        return cls(
            frame,
            is_python,
            runs if is_python else bool(_ENGINE.search(function)),
            is_python and bool(_OPTIMIZERS.search(filename)) and function not in _NO_STEP,
            is_python and filename.endswith(_MODULE) and function in _CALLS,
            is_python and bool(_MAKES_PARAMETERS.search(filename)) and function in _MAKERS,
            "workspace" if not is_python and _WORKSPACE.search(function) else purpose,
            "" if node is None else node[1],
            "aten::_to_copy" if is_autocast else f"aten::{called}" if called else "",
            is_autocast,
        )


def _of_stack(facts: list[_FrameFacts]) -> StackEvidence:
    python = [fact for fact in facts if fact.is_python]
    enters = bool(python) and python[-1].frame.filename.endswith(_ENTERS_PYTHON)
    in_backward = enters or any(fact.is_engine for fact in facts)
    modules, casts = _modules(python), [fact for fact in facts if fact.is_autocast]
    # Conversions first, then what was called from Python, by its name in C++ where that is known.
    called = [*casts, *reversed([fact for fact in facts if not fact.is_python]), *reversed(python)]
    zeroes = any(fact.frame.function == "zero_grad" for fact in python)
    if in_backward:
        kind = BACKWARD
    elif any(fact.is_optimizer for fact in python) and not zeroes:
        kind = OPTIMIZER
    elif modules:
        kind = FORWARD
    else:
        kind = UNKNOWN if python else BLANK
    return StackEvidence(
        kind,
        modules,
        is_recompute=in_backward and any(fact.frame.filename.endswith(_ENTERS_PYTHON[1]) for fact in python),
        makes_parameters=any(fact.makes_parameters for fact in python),
        zeroes=zeroes,
        purpose=next((fact.purpose for fact in facts if fact.purpose), ""),
        operation=next(
            (fact.node for fact in facts if fact.node),
            next((fact.operation for fact in called if fact.operation), ""),
        ),
    )


def _modules(python: list[_FrameFacts]) -> tuple[ModuleCall, ...]:
    calls = []
    for at in range(1, len(python)):
        if python[at].is_call and not python[at - 1].is_call:
            own = python[at - 1].frame
            site = next((fact.frame for fact in python[at:] if not fact.is_call), None)
            called = "" if site is None else f"{PurePosixPath(site.filename).stem}:{site.line}"
            calls.append(ModuleCall(called, PurePosixPath(own.filename).stem, own.line))
    return tuple(reversed(calls))


Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class EventEvidence:
    """The evidence of each event: a row of ``facts``, since the same few repeat a million times."""

    facts: list[StackEvidence]
    row: Ints

    def at(self, events: Ints) -> EventEvidence:
        """That of some events."""
        return EventEvidence(self.facts, self.row[events])

    def kinds(self) -> Ints:
        """The kind of each."""
        return np.array([fact.kind for fact in self.facts], np.int64)[self.row]

    def are(self, test: Callable[[StackEvidence], bool]) -> Bools:
        """Which pass a test."""
        return np.array([test(fact) for fact in self.facts], bool)[self.row]


@dataclass(frozen=True)
class Places:
    """The phase and the step of each event, and the passes of forwards that a backward follows.

    Attributes:
        phase: The number in PHASES of forward, backward, optimizer, init or other.
        step: 0 before the first forward.
        passes: Numbers of the runs of forward events, one for each event of a forward; -1 for others.
        saved: First and last event of each forward that a backward follows at once.
    """

    phase: Ints
    step: Ints
    passes: Ints
    saved: list[tuple[int, int]]


KINDS = {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER}
IN_INIT, IN_FORWARD, IN_BACKWARD, IN_OPTIMIZER, _IN_OTHER = range(5)  # of PHASES


def find_places(evidence: EventEvidence, *, is_native: bool) -> Places:
    """Phases and steps from the evidence of events in order; ``is_native``: their stacks have frames of C++.

    What is between two events of one phase is of it, and what is between a forward and its backward is the loss.
    """
    kinds = evidence.kinds()
    if not is_native:
        kinds = _with_blank_backwards(kinds)
    strong = np.where(kinds >= FORWARD, kinds, -1)
    before, after = _filled(strong), _filled(strong[::-1])[::-1]
    is_loss = (before == FORWARD) & (after == BACKWARD)
    phase = np.where(before == after, before - _TO_PHASE, np.where(is_loss, IN_FORWARD, _IN_OTHER))
    phase[before < 0] = IN_INIT
    phase = np.where(strong >= 0, strong - _TO_PHASE, phase)
    is_silent = kinds == SILENT
    is_silent[:1] = False
    return _with_steps(_filled(np.where(is_silent, -1, phase)), evidence)


#: Kinds of phases are in the order of PHASES.
_TO_PHASE = FORWARD - IN_FORWARD


def _with_blank_backwards(kinds: Ints) -> Ints:
    """Without frames of C++, what follows a forward and has no stack is of the backward.

    So is what a ring that lost its beginning has before the first step of an optimizer.
    """
    strong = np.where(kinds >= FORWARD, kinds, -1)
    before = _filled(strong)
    first = strong[strong >= 0][:1]
    follows = np.isin(before, (FORWARD, BACKWARD)) | ((before < 0) & bool((first == OPTIMIZER).any()))
    return np.where((kinds == BLANK) & follows, BACKWARD, kinds)


def _filled(values: Ints) -> Ints:
    """Each value, or the last before it that is not -1."""
    rows = np.maximum.accumulate(np.where(values >= 0, np.arange(len(values)), -1))
    return np.where(rows >= 0, values[rows], -1)


def _with_steps(phase: Ints, evidence: EventEvidence) -> Places:
    """A step ends with its optimizer's step or zero_grad, or after as many backwards as other steps have."""
    first = np.flatnonzero(np.diff(phase, prepend=-1))
    runs = [*zip(first.tolist(), phase[first].tolist(), strict=True)]
    zeroes = np.flatnonzero(evidence.are(lambda fact: fact.zeroes))
    backwards = "".join({IN_BACKWARD: "b", IN_OPTIMIZER: "o"}.get(name, "") for _, name in runs).split("o")
    # What an optimizer's first step alone allocates says how many backwards a step has.
    most = max(map(len, backwards[:-1]), default=0) or (len(phase) if len(zeroes) else 1)
    begins: list[int] = []  # of steps
    passes = np.full(len(phase), -1, np.int64)
    saved: list[tuple[int, int]] = []
    num_passes, num_backwards, begin, last = 0, 0, 0, IN_INIT
    after = np.append(zeroes, len(phase))
    in_it, behind = (after[np.searchsorted(zeroes, first, side=side)].tolist() for side in ("left", "right"))
    ends = [*first[1:].tolist(), len(phase)]
    for (event, name), end, zero, next_zero in zip(runs, ends, in_it, behind, strict=True):
        is_over = last == IN_OPTIMIZER or (num_backwards >= most and name == IN_FORWARD)
        is_over |= bool(num_backwards) and zero == event
        if is_over or (not begins and name != IN_INIT):
            begins.append(event)
            num_backwards = 0
        num_backwards += name == IN_BACKWARD
        if name == IN_FORWARD:
            begin = event
            passes[event:end] = num_passes
            num_passes += 1
        elif name == IN_BACKWARD and last == IN_FORWARD:
            saved.append((begin, event - 1))
        if num_backwards and next_zero < end:
            begins.append(next_zero)
            num_backwards = 0
        last = name
    step = np.searchsorted(begins, np.arange(len(phase)), side="right")
    return Places(phase, step, passes, [*saved, *_recomputed(evidence)])


def _recomputed(evidence: EventEvidence) -> list[tuple[int, int]]:
    """First and last event of each forward that a backward runs again."""
    again = np.flatnonzero(evidence.are(lambda fact: fact.is_recompute and bool(fact.modules)))
    runs = np.split(again, np.flatnonzero(np.diff(again) > _NEAR) + 1) if len(again) else []
    return [(int(run[0]), int(run[-1])) for run in runs]


#: Events of a forward that runs again are at most so far apart: between them are only what it frees.
_NEAR = 3
