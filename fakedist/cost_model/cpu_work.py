"""The time of operations on large tensors in the host's memory, which a run on the virtual GPU does not compute.

Such tensors hold no values (:mod:`fakedist.gpu.values.no_data`), so the host's clock does not see what they take. A
step has their bytes, elements, FLOPs and threads. A thread takes, in nanoseconds:

==============================  ========  =====  ====  ==================================================
of                              estimate  least  most  measured
==============================  ========  =====  ====  ==================================================
a byte read or written          0.25      0.02   1.5   0.024 (add_) to 0.84 (transpose), 1.3 (tanh, pow)
a random number                 8         1      40    6.2 (normal_) to 32 (dropout)
an element sorted, times log2   5         0.3    15    5.7 (rows) to 11.8 (16 M elements; unique)
an element picked or resampled  12        1      150   3.5 (pooling) to 25 (median, scatter), 120 (index)
a FLOP                          0.02      0.005  0.3   0.011 (bf16) to 0.051 (convolution)
==============================  ========  =====  ====  ==================================================

Measured with torch 2.15 and 16 M floats (2,048-square products) in one thread of an AMD EPYC on which other work ran.
The least is for a faster core: 50 GB/s, and 200 GFLOP/s of AVX-512. More threads share bytes and FLOPs, up to 16, which
one socket's memory feeds; torch may have more where the job runs, so the least has at least 16, and the most has one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isnan, log2
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.rundir.launch_records import HostWork
from fakedist.rundir.step_time import CpuWork

#: Nanoseconds: the least, the estimate and the most.
_BYTE_NS, _FLOP_NS = np.array([0.02, 0.25, 1.5]), np.array([0.005, 0.02, 0.3])
_SORTS, _SORTED_NS = r"\.(arg|m)?sort|unique", np.array([0.3, 5.0, 15.0])
#: Other operations that take time by their elements, with these nanoseconds.
_BY_ELEMENTS = {
    r"\.(rand|normal|log_normal|uniform|bernoulli|native_dropout|exponential|poisson)": np.array([1.0, 8.0, 40.0]),
    r"\.(topk|kthvalue|nanmedian|median|mode|index|gather|scatter|take|embedding|masked|nonzero|where|cum|logcumsum)"
    r"|hist|bincount|searchsorted|bucketize|upsample|grid_sampler|pool|multinomial": np.array([1.0, 12.0, 150.0]),
}
_MOST_THREADS = 16


def cpu_work_us(launches: pd.DataFrame) -> npt.NDArray[Any]:
    """The least, the estimate and the most of this work before each launch: an array of 3 x rows."""
    if "host_work" not in launches or not len(launches):
        return np.zeros((3, len(launches)))
    texts = pd.Categorical(launches["host_work"]).remove_unused_categories()  # texts of a record are grids, too
    of_text = np.array([sum(map(_us, _read(str(text))), np.zeros(3)) for text in texts.categories])
    found: npt.NDArray[Any] = of_text[texts.codes].T
    return found


def cpu_work(launches: pd.DataFrame) -> CpuWork | None:
    """This work in a step; None without any."""
    works = [work for text in launches.get("host_work", ()) for work in _read(str(text))]
    if not works:
        return None
    times_us = np.array([*map(_us, works)])
    by_line = pd.Series(times_us[:, 1]).groupby([work.line for work in works]).sum()
    low_us, time_us, high_us = times_us.sum(axis=0).tolist()
    moved_bytes = sum(work.moved_bytes for work in works)
    return CpuWork(len(works), moved_bytes, time_us, low_us, high_us, str(by_line.idxmax()))


def _read(text: str) -> Iterator[HostWork]:
    return map(HostWork.read, filter(None, text.split("\n")))


def _us(work: HostWork) -> npt.NDArray[Any]:
    """The least, the estimate and the most microseconds of an operation."""
    flops = 0.0 if isnan(work.flops) else work.flops
    shared = np.maximum(work.moved_bytes * _BYTE_NS, flops * _FLOP_NS)
    threads = min(work.threads, _MOST_THREADS)
    each_ns = next((ns for names, ns in _BY_ELEMENTS.items() if re.search(names, work.operation)), np.zeros(3))
    if re.search(_SORTS, work.operation):
        each_ns = log2(max(work.elements, 2)) * _SORTED_NS
    alone = work.elements * each_ns
    most = _MOST_THREADS if threads > 1 else 1
    time_ns = np.maximum(shared / [most, threads, 1], alone / [most, 1, 1])
    return time_ns / 1e3
