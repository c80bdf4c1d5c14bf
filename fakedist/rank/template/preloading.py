"""Imports in a template what a rank's script imported, and sees that a rank can fork from it."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.virtual import VirtualGpu, virtual_gpu
from fakedist.rank.template.hidden import HiddenModules
from fakedist.rank.template.learned import TORCH, Learned, Scene, is_installed
from fakedist.rank.template.recording import Recording
from fakedist.rank.template.starting import Ready

_OURS = Path(__file__).parents[2]
#: The attribute by which ``torch.compile`` marks a function that it returns (torch/_dynamo/eval_frame.py).
_COMPILED = "_torchdynamo_orig_callable"
_LIBRARIES = tuple(sysconfig.get_path(each) for each in ("stdlib", "platstdlib"))


class CannotForkError(Exception):
    """Ranks cannot fork from this process. The message says which import is why.

    Args:
        message: The message.
        without: What not to import, so that ranks may fork: a module of torch's, or a framework. Empty if it is not
            known.
    """

    def __init__(self, message: str, without: str = "") -> None:
        super().__init__(message)
        self.without = without


def preload(learned: Learned, path: Path) -> Ready:
    """Import the modules, and hide them.

    Args:
        learned: What to import.
        path: The file that it came from.

    Raises:
        CannotForkError: A module asked CUDA for its devices, started a thread, or did something else that forked
            ranks would not find as if they had imported it.
    """
    name, devices, memory_bytes = learned.gpu
    recording = Recording(devices)
    ready = Ready(learned, path, HiddenModules(recording.imported))
    before, handlers, scenes = Scene.now(), _handlers(), dict(learned.scenes)
    gpus = virtual_gpu(find_gpu(name), devices=devices, memory_bytes=memory_bytes)
    with _main_of_script(learned), gpus as gpu:
        for each in learned.modules:
            if (scene := scenes.get(each)) is not None:
                _set_scene(scene)
            if each not in sys.modules:
                _import_root(each, recording, ready)
                _check(each, gpu, recording)
        compute_key()
        ready.hidden.hide()
    _set_scene(before)
    if _handlers() != handlers:
        raise CannotForkError("an import handles signals")
    _see_that_all_is_installed(ready.hidden)
    note_what_is_compiled(ready.hidden)
    _see_that_forks_work(ready.hidden)
    gc.collect()  # a rank then walks only what it makes itself
    return ready


def compute_key() -> None:
    """Have Inductor, if it was imported, hash torch's sources, as every rank would again: its cache's key."""
    if callable(key := getattr(sys.modules.get("torch._inductor.codecache"), "torch_key", None)):
        with suppress(Exception):  # raised again in the rank
            key()


@contextmanager
def _main_of_script(learned: Learned) -> Iterator[None]:
    """Let imports find a ``__main__`` like the script's. Those that keep it get the rank's own later."""
    is_module, target = json.loads(learned.key)
    before, main = sys.modules["__main__"], ModuleType("__main__")
    if not is_module:
        main.__file__ = os.path.join(learned.cwd, target)
    sys.modules["__main__"] = main
    try:
        yield
    finally:
        sys.modules["__main__"] = before


def _import_root(name: str, recording: Recording, ready: Ready) -> None:
    """Import a module that nothing has asked for yet."""
    ready.roots.append(name)
    with recording.on(), _kept_output() as said:
        try:
            importlib.import_module(name)
        except Exception:  # the script's own import may fail, too, and go another way
            ready.roots.remove(name)
    if any(texts := (said[0](), said[1]())):
        ready.said[name] = texts


def _check(name: str, gpu: VirtualGpu, recording: Recording) -> None:
    if gpu.visible():
        raise CannotForkError(f"import {name} asks CUDA for its devices", _left_out(name))
    if threading.active_count() > 1:
        raise CannotForkError(f"import {name} starts a thread", _left_out(name))
    if any(each.path_differs for each in recording.imported.values()):
        raise CannotForkError(f"import {name} changes sys.path", _left_out(name))


def _left_out(name: str) -> str:
    """What to leave out because of a module. A framework's modules would import what they need of it again."""
    top = name.partition(".")[0]
    return name if top in TORCH else top


def _set_scene(scene: Scene) -> None:
    for name in os.environ.keys() - scene.environment.keys():
        del os.environ[name]
    for name, value in scene.environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    sys.path[:] = scene.path


def _handlers() -> list[object]:
    return [signal.getsignal(number) for number in signal.valid_signals()]


def _see_that_all_is_installed(hidden: HiddenModules) -> None:
    """See that no file of the script was imported. It may be edited between two ranks."""
    for name in hidden.imported:
        place = getattr(hidden.modules.get(name), "__file__", None)
        if place and not (is_installed(place) or _OURS in Path(place).parents or place.startswith(_LIBRARIES)):
            raise CannotForkError(f"{name} is the script's own")


def note_what_is_compiled(hidden: HiddenModules) -> None:
    """Note which frameworks' modules called ``torch.compile``: their functions, or methods of their classes, are."""
    for name, done in hidden.imported.items():
        if name.partition(".")[0] in TORCH:
            continue
        values = list(getattr(hidden.modules.get(name), "__dict__", {}).values())
        values += [member for value in values if isinstance(value, type) for member in vars(value).values()]
        functions = (each.__func__ if isinstance(each, staticmethod | classmethod) else each for each in values)
        done.compiled = any(isinstance(each, FunctionType) and _COMPILED in vars(each) for each in functions)


def _see_that_forks_work(hidden: HiddenModules) -> None:
    """See that CUDA can be initialised in a fork, and that no thread of a library would be missing in it.

    OpenBLAS ends its threads before a fork, and starts them again when it needs them.
    """
    cuda: Any = hidden.modules.get("torch.cuda")
    if (child := os.fork()) == 0:
        os._exit(int(cuda is not None and cuda._is_in_bad_fork()))
    _, status = os.waitpid(child, 0)
    if status:
        raise CannotForkError("torch does not initialise CUDA in a fork")
    if len(os.listdir("/proc/self/task")) > 1:
        raise CannotForkError("an import starts threads")


@contextmanager
def _kept_output() -> Iterator[tuple[Callable[[], bytes], Callable[[], bytes]]]:
    """Keep what is printed, and return it once the context is over."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        kept = [os.dup(1), os.dup(2)]
        read: dict[int, bytes] = {}
        sys.stdout.flush()
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            yield (lambda: read[1], lambda: read[2])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, (before, file) in enumerate(zip(kept, (out, err), strict=True), 1):
                os.dup2(before, number)
                os.close(before)
                file.seek(0)
                read[number] = file.read()
