from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakedist.launcher import keeping
from fakedist.launcher.keeping import TemplateKeeper


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateKeeper]:
    (program := tmp_path / "template.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(keeping, "_PROGRAM", str(program))
    made = TemplateKeeper(tmp_path / "learned.json")
    yield made
    made.close()


def learn(keeper: TemplateKeeper, key: str = "script", **more: object) -> None:
    """Write the file as a rank that starts on its own does."""
    scratch = keeper.learned.with_suffix(".new")
    scratch.write_text(json.dumps({"key": key, "started": dict(os.environ), "cwd": "/", **more}))
    os.replace(scratch, keeper.learned)


def test_a_template_serves_until_a_rank_learns_something_else(keeper: TemplateKeeper) -> None:
    assert keeper.open_door("script") is None
    pids = []
    for modules in (["torch", "torch.fx"], ["torch"]):  # the template itself may leave some out
        learn(keeper, modules=modules)
        assert keeper.open_door("script") is not None
        pids.append(keeper.pid)
    assert pids[0] == pids[1]
    assert keeper.open_door("another script") is None
    learn(keeper, counts=1)
    assert keeper.open_door("script") is not None
    assert keeper.pid != pids[0]


def test_no_more_templates_when_ranks_start_again_each_time(keeper: TemplateKeeper) -> None:
    served = []
    for number in range(5):
        learn(keeper, counts=number)
        served.append(keeper.open_door("script") is not None)
    assert served == [True, True, True, False, False]
    assert keeper.pid is None
    assert keeper.open_door("script") is None  # also when nothing is written any more
    learn(keeper, "another script")
    assert keeper.open_door("another script") is not None
