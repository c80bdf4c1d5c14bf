"""Jobs with more steps are the same programs with larger numbers of steps, and nothing else."""

from __future__ import annotations

from tests.clients.catalogue import ENTRIES
from tests.clients.longer import lengthened
from tests.conftest import ROOT

_JOB = """
max_steps = 3
layers = [Layer() for _ in range(2)]
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--layers", type=int, default=6)
trainer = Trainer(max_steps=4, layers=4)
for ä in range(1, 3): loss.backward(); optimizer.step()
for layer in range(3):
    layer.forward()
"""


def test_numbers_of_steps_alone_are_larger() -> None:
    longer = _JOB.replace("max_steps = 3", "max_steps = 12").replace(
        '"--steps", type=int, default=6', '"--steps", type=int, default=12'
    )
    longer = longer.replace("max_steps=4", "max_steps=12").replace("range(1, 3)", "range(1, 12)")
    assert lengthened(_JOB) == longer


def test_most_jobs_of_the_catalogue_name_their_steps() -> None:
    scripts = {entry.script for entry in ENTRIES if not entry.script.startswith("-m ")}
    longer = [script for script in scripts if lengthened((ROOT / script).read_text()) != (ROOT / script).read_text()]
    assert len(longer) > len(scripts) / 3
