"""Subjects of reports that no small run gives, made by hand: a check."""

from __future__ import annotations

from pathlib import Path

from fakedist.check.checking import Checked, Mismatch
from fakedist.check.config import Figure, read_config
from fakedist.check.judging import JudgedFigure
from fakedist.errors import ScriptError
from fakedist.units import GIB


def checked(folder: Path) -> Checked:
    """A check that has one of everything."""
    (folder / "src").mkdir(parents=True)
    (folder / "src/model, 2.py").write_text("pass\n")
    (folder / "pyproject.toml").write_text(
        '[[tool.fakedist.check.jobs]]\nname = "net"\nscript = "train.py"\nworld_size = 8\n'
    )
    made = {"blame": "activations of h.*", "line": "src/model, 2.py:7 (forward)"}
    grew = JudgedFigure("net", 0, Figure("peak_allocated"), 6.0 * GIB, None, 5.0 * GIB, 5.05 * GIB, "1%", **made)
    over = JudgedFigure("net", 0, Figure("layers", "h.*.mlp"), 3.0 * GIB, 2.0 * GIB, line="/elsewhere/lib.py:3 (call)")
    return Checked(
        read_config(folder / "pyproject.toml"),
        judged=[
            grew,
            over,
            JudgedFigure("net", 0, Figure("headroom"), 3.0 * GIB, 2.0 * GIB),
            JudgedFigure("net", 1, Figure("peak_reserved"), 5.0 * GIB),
            JudgedFigure("net", 1, Figure("step_time"), 21_000.0, 25_000.0, source="estimated"),
        ],
        warnings=["the baseline of net was made with other settings: torch 1 -> 2"],
        misfits=["net rank 1 does not fit the GPU: CUDA out of memory"],
        mismatches=[Mismatch("net", "net: the job hangs", "src/model, 2.py:1 (forward)")],
        failures=[ScriptError("net rank 2: the script failed", output="Traceback ```")],
    )
