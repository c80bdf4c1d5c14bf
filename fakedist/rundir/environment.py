"""Environment variables that both halves read: settings of PyTorch's allocator, and NCCL's."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from fakedist.errors import JobError

#: The variables with the allocator's settings: first the name since torch 2.9, then the older one.
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: If this is set to anything, every tensor is its own cudaMalloc (c10/cuda/CUDACachingAllocator.cpp).
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"


def refusal(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Why an allocator with these settings keeps no history, and what to type; None if it keeps one."""
    for name in SETTINGS:
        if re.search(r"backend\s*:\s*cudaMallocAsync", environment.get(name, "")):
            message = f"{name} asks for the backend cudaMallocAsync, which keeps no history of its allocations"
            return message, f"--env {name}=   (peaks are then those of PyTorch's native caching allocator)"
    if NO_CACHING in environment:
        message = f"{NO_CACHING} switches the caching allocator off, and nothing else keeps a history of allocations"
        return message, f"unset {NO_CACHING}   (empty counts as set)"
    return None


#: Integers, as NCCL_PARAM reads them (src/misc/param.cc).
NUMBERS = (
    "NCCL_BUFFSIZE",
    "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_MIN_P2P_NCHANNELS",
    "NCCL_MAX_P2P_NCHANNELS",
    "NCCL_NCHANNELS_PER_NET_PEER",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_P2P_NVL_CHUNKSIZE",
    "NCCL_P2P_PCI_CHUNKSIZE",
    "NCCL_NVLS_ENABLE",
    "NCCL_NVLS_CHUNKSIZE",
    "NCCL_NVLS_NCHANNELS",
    "NCCL_PAT_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_RUNTIME_CONNECT",
)
#: Lists of names. NCCL_PROTO makes no difference to memory: a connection has buffers for every protocol.
TEXTS = ("NCCL_ALGO", "NCCL_PROTO")
_NUMBER = re.compile(r"\s*([+-]?(?:0[xX][0-9a-fA-F]+|\d+))")


def check_variable(name: str, value: str) -> None:
    """Check that a variable of a job's ``nccl_env`` matters, and that NCCL reads its whole value.

    Raises:
        JobError: The variable makes no difference, or its value is not an integer.
    """
    if name not in (*NUMBERS, *TEXTS):
        close = difflib.get_close_matches(name, (*NUMBERS, *TEXTS), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise JobError(
            f"{name} does not change the estimates of NCCL's memory and time",
            f"{hint}--env {name}={value} sets it for the script alone",
        )
    if name in NUMBERS and ((match := _NUMBER.match(value)) is None or match.group() != value):
        raise JobError(f"{name}={value} is not a whole number, and NCCL reads nothing else", f"{name}=1024")


def number(environment: Mapping[str, str], name: str) -> int | None:
    """A variable as NCCL reads it: the number its value begins with; None if it is unset or begins with no number."""
    match = _NUMBER.match(environment.get(name, ""))
    if match is None:
        return None
    text = match.group(1)
    octal = text.lstrip("+-").startswith("0") and text.lstrip("+-").isdigit()
    try:
        return int(text, 8 if octal else 0)  # strtoll with base 0
    except ValueError:  # an octal number with an 8 or 9 in it
        return None


def nccl_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter and are set."""
    return {name: environ[name] for name in (*NUMBERS, *TEXTS) if environ.get(name)}
