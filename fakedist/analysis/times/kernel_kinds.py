"""The timed step's kernels, and the common basis of all tables of times: which compute, when, and for how long."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array, Recording
from fakedist.run.encoding import columns_of
from fakedist.run.schema import BOUNDS, FAMILIES, KINDS, PHASES
from fakedist.run.trace_records import KernelsRecord

#: Families of compute. Communication is not one of them.
COMPUTE_FAMILIES = tuple(name for name in FAMILIES if name != "communication")
#: Families whose floating-point operations make up the model's. Kernels whose operations are unknown are counted.
_COUNTED = ("gemm", "attention")


def kernel_table(recording: Recording) -> pd.DataFrame:
    """The table ``kernels`` as a tool saw them: one row per kernel, copy, fill or collective, in order of start."""
    columns = recording.kernels
    texts = {"family": FAMILIES, "phase": PHASES, "bound": BOUNDS}
    texts |= dict.fromkeys(("name", "grid", "block", "operation"), tuple(recording.kernel_texts))
    frame = pd.DataFrame({name: columns[name] for name in columns_of(KernelsRecord)})
    for name, known in texts.items():
        frame[name] = np.array(known or ("",), object)[columns[name]]
    frame["recompute"] = frame["recompute"].astype(bool)
    frame = frame.assign(low_us=np.nan, high_us=np.nan, shape="", basis="", launch=-1)
    return frame.sort_values(["start_us", "stream"], kind="stable").reset_index(drop=True)


def places(values: pd.Series, known: tuple[str, ...]) -> Array:
    """Texts as indices into ``known``.

    Raises:
        ValueError: A text is not in ``known``.
    """
    categories = values.astype("category")
    of_category = np.array([known.index(str(name)) for name in categories.cat.categories], "i8")
    return of_category[categories.cat.codes.to_numpy()] if len(values) else np.zeros(0, "i8")


def timed(kernels: pd.DataFrame) -> pd.DataFrame:
    """The table ``kernels`` with the columns that all tables of times need.

    Added columns: ``kind`` and ``family`` as indices into ``KINDS`` and ``FAMILIES``; ``is_compute``; ``is_call`` (a
    collective's only or first kernel); ``is_known`` (the duration is known); ``known_us`` (the duration, 0 if unknown);
    ``lacks_flops`` (a matrix product or attention whose operations are not counted).
    """
    phase = kernels["phase"].astype(str)
    kind = phase.where(phase.isin(KINDS), "other").where(~kernels["recompute"].astype(bool), "recompute")
    family = places(kernels["family"], FAMILIES)
    duration = kernels["duration_us"].to_numpy("f8")
    is_known = np.isfinite(duration)
    is_compute, call = family != FAMILIES.index("communication"), kernels["call"]
    counted = np.isin(family, [FAMILIES.index(name) for name in _COUNTED])
    return kernels.assign(
        kind=places(kind, KINDS),
        family=family,
        is_compute=is_compute,
        is_call=~is_compute & ((call < 0) | ~call.duplicated()).to_numpy(bool),
        is_known=is_known,
        known_us=np.where(is_known, duration, 0.0),
        lacks_flops=counted & ~np.isfinite(kernels["flops"].to_numpy("f8")),
    )


def kind_family_us(kernels: pd.DataFrame) -> Array:
    """Known compute time in microseconds, shape (number of ``KINDS``, number of ``FAMILIES``).

    Args:
        kernels: The result of :func:`timed`.
    """
    compute = kernels[kernels["is_compute"]]
    sums = np.zeros((len(KINDS), len(FAMILIES)))
    np.add.at(sums, (compute["kind"].to_numpy("i8"), compute["family"].to_numpy("i8")), compute["known_us"].to_numpy())
    return sums


def generation_us(kernels: pd.DataFrame) -> float:
    """How long the step generates, in microseconds: from the first kernel of each generation to the end of its last.

    What is between its kernels belongs to it (sampling, waits for the host), unless a forward, a backward or an
    optimizer's step separates them.

    Args:
        kernels: The result of :func:`timed`.
    """
    generation, other = KINDS.index("generation"), KINDS.index("other")
    tells = kernels[kernels["kind"] != other].sort_values("start_us", kind="stable")
    is_one = (tells["kind"] == generation).to_numpy(bool)
    number = np.cumsum(~is_one)[is_one]  # of the stretch between others
    rows = tells[is_one]
    stretches = rows.assign(end_us=rows["start_us"] + rows["known_us"]).groupby(number)
    return float((stretches["end_us"].max() - stretches["start_us"].min()).sum())
