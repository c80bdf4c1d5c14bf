"""Inference engines that the script imports: the torch that vLLM needs, and phases that need no ``fakedist.phase``."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from types import ModuleType

import torch

from fakedist.errors import SetupError
from fakedist.importing import imported_within, when_imported
from fakedist.patch import patched
from fakedist.record.named_phases import NamedPhases

_PIN = re.compile(r"torch\s*\(?===?\s*([^\s,;)]+)")
#: Class, method and phase, by module: of vLLM 0.33.0 and TRL 1.16.0.
_PHASES = {
    "vllm.entrypoints.llm": (("LLM", "generate", "rollout"), ("LLM", "sleep", "sleep"), ("LLM", "wake_up", "wake")),
    "trl.generation.vllm_generation": (("VLLMGeneration", "sync_weights", "weight sync"),),
    "trl.trainer.grpo_trainer": (("GRPOTrainer", "_get_per_token_logps_and_entropies", "log-probs"),),
}
#: Methods that compute with gradients, too, where they are part of the loss.
_ALSO_IN_TRAINING = {"_get_per_token_logps_and_entropies"}


def see_that_torch_fits(engine: str) -> None:
    """Compare the torch that a distribution pins with the one that is installed.

    Raises:
        SetupError: They differ.
    """
    try:
        requirements, version = metadata.requires(engine) or [], metadata.version(engine)
        has = metadata.version("torch")
    except metadata.PackageNotFoundError:  # imported from a source tree
        return
    pins = [pin[1] for requirement in requirements if (pin := _PIN.match(requirement)) and ";" not in requirement]
    for needs in pins:
        if has.partition("+")[0] != needs.partition("+")[0]:
            what = f"torch {has} is installed, and {engine} {version} needs torch {needs}"
            raise SetupError(f"{what}: pip install torch=={needs} in an environment of its own (see docs/rl.md)")


@contextmanager
def watched_engines(phases: NamedPhases) -> Iterator[None]:
    """Check the torch of vLLM when it is imported, and record phases of what engines and their trainers do."""

    @contextmanager
    def checked(module: ModuleType) -> Iterator[None]:
        see_that_torch_fits(module.__name__)
        yield

    with ExitStack() as stack:

        def watch(module: ModuleType) -> None:
            for owner_name, name, title in _PHASES[module.__name__]:
                owner = getattr(module, owner_name, None)
                if hasattr(owner, name):  # releases differ
                    inside = _in_phase(getattr(owner, name), title, phases)
                    stack.enter_context(patched(owner, name, inside))

        for name in _PHASES.keys() & sys.modules.keys():
            watch(sys.modules[name])
        stack.enter_context(imported_within("vllm".__eq__, checked))
        stack.enter_context(when_imported(_PHASES.__contains__, watch))
        yield


def _in_phase(original: Callable[..., object], title: str, phases: NamedPhases) -> Callable[..., object]:
    only_without_gradients = getattr(original, "__name__", "") in _ALSO_IN_TRAINING

    @functools.wraps(original)
    def inside(*args: object, **kwargs: object) -> object:
        if phases.is_named or (only_without_gradients and torch.is_grad_enabled()):
            return original(*args, **kwargs)
        with phases.named(title):
            return original(*args, **kwargs)

    return inside
