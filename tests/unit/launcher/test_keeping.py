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
    monkeypatch.setattr(keeping, "OF_A_TEMPLATE", "import time; time.sleep(60)")
    made = TemplateKeeper(tmp_path / "learned.json")
    yield made
    made.close()


def learn(keeper: TemplateKeeper, key: str = "script") -> None:
    """What a rank that starts on its own does."""
    scratch = keeper.learned.with_suffix(".new")
    scratch.write_text(json.dumps({"key": key, "environment": dict(os.environ), "cwd": "/"}))
    os.replace(scratch, keeper.learned)


def test_a_template_serves_until_a_rank_starts_again(keeper: TemplateKeeper) -> None:
    assert keeper.open_channel("script") is None
    learn(keeper)
    pids = []
    for _ in range(2):
        channel = keeper.open_channel("script")
        assert channel is not None
        channel.close()
        pids.append(keeper.pid)
    assert pids[0] == pids[1]
    assert keeper.open_channel("another script") is None
    learn(keeper)
    channel = keeper.open_channel("script")
    assert channel is not None
    channel.close()
    assert keeper.pid != pids[0]


def test_no_more_templates_when_ranks_start_again_each_time(keeper: TemplateKeeper) -> None:
    served = []
    for _ in range(5):
        learn(keeper)
        channel = keeper.open_channel("script")
        served.append(channel is not None)
        if channel is not None:
            channel.close()
    assert served == [True, True, True, False, False]
    assert keeper.pid is None
    assert keeper.open_channel("script") is None  # also when nothing is written any more
    learn(keeper, "another script")
    channel = keeper.open_channel("another script")
    assert channel is not None
    channel.close()
