"""The tables of what the timed step launched on the virtual GPU."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.analysis.recording import NUMPY_TYPES, Array, empty_columns
from fakedist.run.encoding import columns_of
from fakedist.run.launch_records import LAUNCH_KINDS, LaunchesRecord, WorkRow
from fakedist.run.launch_schema import LAUNCHES, WORK
from fakedist.run.schema import PHASES


def launch_table(record: LaunchesRecord | None) -> pd.DataFrame:
    """The table ``launches``: a row for each launch, event and wait, in the order of the host. Texts are categorical.

    Args:
        record: The launches; None if there are none.
    """
    columns: dict[str, Array]
    if record is None:
        columns = empty_columns(LaunchesRecord)
    else:
        codes = columns_of(LaunchesRecord)
        columns = {name: np.frombuffer(getattr(record, name), NUMPY_TYPES[code]) for name, code in codes.items()}
    shapes = [""] if record is None else record.texts
    known = {"what": list(LAUNCH_KINDS), "phase": list(PHASES), "grid": shapes, "block": shapes}
    texts = {name: pd.Categorical.from_codes(columns[name].astype(np.int32), pd.Index(known[name])) for name in known}
    step = np.full(len(columns["what"]), 0 if record is None else record.step, "i4")
    found = pd.DataFrame({**columns, **texts, "recompute": columns["recompute"].astype(bool), "step": step})
    found = found.assign(measured_us=np.nan, host_us=np.nan)
    return found[[column.name for column in LAUNCHES.columns]]


def work_table(record: LaunchesRecord | None) -> pd.DataFrame:
    """The table ``work``: a row for each distinct piece of work.

    Args:
        record: The launches; None if there are none.
    """
    types: dict[str, type] = {"string": object, "int64": np.int64, "double": np.float64, "bool": bool}
    rows = pd.DataFrame([] if record is None else record.work_rows, columns=list(WorkRow._fields), dtype=object)
    return rows.astype({column.name: types[column.type] for column in WORK.columns})
