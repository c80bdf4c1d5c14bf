"""The time of the caching allocator's calls to CUDA, in a step whose memory does not suffice.

A steady step makes none. Near the GPU's limit, a request that is refused has the allocator wait for the GPU, give back
what it caches and ask again (``num_alloc_retries``), and later requests take that memory anew. So does
``torch.cuda.empty_cache``, at the script's will. A step in which nothing is given back only makes its caches grow, as
the first ones do, which later steps need not repeat: its calls take no time here.

No call was measured on an H100. What was published, in microseconds:

=====================  ======================  ==========  =======================  =========  ========
call                   notes [1], by size      A100 [2]    RTX PRO 6000 [3]         [2], other  [4]
=====================  ======================  ==========  =======================  =========  ========
cudaMalloc             223 + 0.10 a MiB
cudaFree               75 + 0.37 a MiB
cuMemCreate            71                      193         14                       7.6        29
cuMemMap               3.4                     1.5         1.0                      1.1
cuMemSetAccess         91 + 0.036 a MiB        36          69 for each piece        21         38
cuMemUnmap             37                      26          39                       11         34
cuMemRelease           26 + 0.37 a MiB
=====================  ======================  ==========  =======================  =========  ========

[1] "VMM call latency", public notes on cudaMalloc and virtual memory, 2 MiB to 4 GiB, medians of 20 to 50 samples on an
unnamed GPU with driver 580.178. Back to back, 62 of 160 calls of cuMemSetAccess and cuMemUnmap took about 2 ms, most of
them after memory was freed, and 23 % of the calls of cudaMalloc took more than 1 ms. [2] ovg-project/kvcached,
benchmarks/bench_vmm, pieces of 2 MiB; the other GPU is not named. [3] vmm_probe.cu, a public feasibility test with its
results, driver 580.82.07, pieces of 2 to 64 MiB. It also found that mapping waits for no kernel. [4] vAttention (arXiv
2405.04437), pieces of 2 MiB, as [1] quotes it.

A piece costs the same whatever its size (pytorch/pytorch#96995). Estimates are geometric means over the sources. The
least is the shortest, the most the longest with 62 of 160 calls 2 ms longer: no source says on which GPUs calls stall
like that. ``cudaFree`` waits for the whole device (NVIDIA's blog on RMM); before it unmaps a piece, torch waits for its
stream (``ExpandableSegment::unmapHandles``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.rundir.launch_records import ALLOCATOR_CALLS, ALLOCATOR_WAITS
from fakedist.rundir.step_time import AllocatorTime

_MIB = 1 << 20
#: How much longer a call takes on average if 62 of 160 take 2 ms more.
_STALLS_US = 62 / 160 * 2000


@dataclass(frozen=True)
class CallCost:
    """Microseconds of a call, at least, as estimated and at most, and those for each MiB."""

    least_us: float
    us: float
    most_us: float
    mib_us: float = 0.0


#: cudaMalloc takes the same steps as a mapping in one call [1], so both have one least. The time of a refusal was not
#: published: as long as cuMemCreate, or nothing.
_LEAST_MAP_US = 7.6 + 1.1 + 21.0
COSTS = {
    "refused": CallCost(0.0, 33.0, 193.0),
    "malloc": CallCost(_LEAST_MAP_US, 223.0, 223.0 + _STALLS_US, 0.10),
    "free": CallCost(11.0, 75.0, 75.0 + _STALLS_US, 0.37),
    "map": CallCost(_LEAST_MAP_US, 91.0, 193.0 + 1.5 + 36.0 + _STALLS_US, 0.036),
    "unmap": CallCost(11.0, 27.0 + 26.0, 39.0 + 26.0 + _STALLS_US, 0.37),
}
assert tuple(COSTS) == ALLOCATOR_CALLS


class _Calls(NamedTuple):
    name: str
    number: int
    num_bytes: int


def _read(text: str) -> Iterable[_Calls]:
    """The calls of a text of ``LaunchesRecord.allocator``."""
    for part in filter(None, text.split(", ")):
        if part != ALLOCATOR_WAITS:
            name, number, num_bytes = part.split(" ")
            yield _Calls(name, int(number), int(num_bytes))


def allocator_us(launches: pd.DataFrame) -> npt.NDArray[Any]:
    """The least, the estimate and the most of the allocator's calls before each launch: an array of 3 x rows."""
    if "allocator" not in launches:
        return np.zeros((3, len(launches)))
    texts = pd.Categorical(launches["allocator"]).remove_unused_categories()  # texts of a record are grids, too
    calls = [list(_read(str(text))) for text in texts.categories]
    gives_back = np.array([any(call.name in ("free", "unmap") for call in each) for each in calls], bool)
    if not gives_back[texts.codes].any():
        return np.zeros((3, len(launches)))
    of_text = np.array([[_sum_us(each, bound) for each in calls] for bound in ("least_us", "us", "most_us")])
    found: npt.NDArray[Any] = of_text[:, texts.codes]
    return found


def _sum_us(calls: Iterable[_Calls], bound: str) -> float:
    return sum(
        call.number * float(getattr(COSTS[call.name], bound)) + call.num_bytes / _MIB * COSTS[call.name].mib_us
        for call in calls
    )


def waits_of_allocator(launches: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """The rows at which the host waits so that the allocator may give memory back."""
    if "allocator" not in launches:
        return np.zeros(len(launches), bool)
    waits = launches["what"].astype(str).str.startswith("host_waits").to_numpy(bool)
    return waits & (launches["allocator"].astype(str) != "").to_numpy(bool)


def allocator_time(launches: pd.DataFrame, waited_us: npt.NDArray[Any]) -> AllocatorTime | None:
    """The allocator's calls in a step, which waits ``waited_us`` at each row; None if it gives nothing back."""
    least_us, us, most_us = (float(each.sum()) for each in allocator_us(launches))
    if not us:
        return None
    number, num_bytes = dict.fromkeys(ALLOCATOR_CALLS, 0), dict.fromkeys(ALLOCATOR_CALLS, 0)
    for text, rows in launches["allocator"].astype(str).value_counts().items():
        for call in _read(str(text)):
            number[call.name] += call.number * int(rows)
            num_bytes[call.name] += call.num_bytes * int(rows)
    return AllocatorTime(
        num_retries=number["refused"],
        refused_bytes=num_bytes["refused"],
        num_given_back=number["free"] + number["unmap"],
        given_back_bytes=num_bytes["free"] + num_bytes["unmap"],
        num_taken=number["malloc"] + number["map"],
        taken_bytes=num_bytes["malloc"] + num_bytes["map"],
        time_us=us,
        low_us=least_us,
        high_us=most_us,
        wait_us=float(waited_us[waits_of_allocator(launches)].sum()),
    )
