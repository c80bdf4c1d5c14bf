"""Played steps: the lengths that are drawn, the settings, and what is said of the plays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fakedist.errors import JobError
from fakedist.extras.play import long_runs
from fakedist.extras.play.long_runs import (
    _setting,
    _settings,
    fitting_steps,
    name_sequence,
    parse_every,
    parse_lengths,
)


def drawn(text: str | None, recorded: list[int], number: int = 10_000, seed: int = 0) -> list[int]:
    return parse_lengths(text, recorded)(np.random.default_rng(seed), number).tolist()


def test_lengths_have_the_mean_and_the_most_that_are_given() -> None:
    lengths = drawn("lognormal:1000,0.5,100000", [1])
    assert np.mean(lengths) == pytest.approx(1000, rel=0.03)
    assert np.std(np.log(lengths)) == pytest.approx(0.5, rel=0.03)
    assert max(drawn("lognormal:1000,0.5,1200", [1])) == 1200
    assert (
        lengths[:9]
        == drawn("lognormal:1000,0.5,100000", [1])[:9]
        != drawn("lognormal:1000,0.5,100000", [1], seed=1)[:9]
    )


def test_lengths_come_from_a_file_or_the_recording(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("7\n9\n9\n")
    assert set(drawn(str(tmp_path / "lengths"), [1])) == {7, 9}
    assert set(drawn(None, [3, 5])) == {3, 5}


@pytest.mark.parametrize("text", ["", "7\nlong", "0", "-3"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(JobError, match="expected one length per line"):
        drawn(str(tmp_path / "lengths"), [1])


@pytest.mark.parametrize("text", ["lognormal:1000", "lognormal:0,1,5", "lognormal:5,1,0", "lognormal:a,1,5"])
def test_other_distributions_are_refused(text: str) -> None:
    with pytest.raises(JobError, match="is not lognormal:MEAN,SIGMA,MAX"):
        drawn(text, [1])


def test_missing_files_are_refused() -> None:
    with pytest.raises(JobError, match="cannot be read"):
        drawn("/no/such/file", [1])


def test_settings_replace_their_own_and_keep_the_others() -> None:
    found = {
        name: (conf, every)
        for name, conf, every in _settings("roundup_power2_divisions:[256:1,>:2],max_split_size_mb:9")
    }
    own = "roundup_power2_divisions:[256:1,>:2],max_split_size_mb:9"
    assert found[own] == (own, 0)
    assert found["max_split_size_mb:256"] == ("roundup_power2_divisions:[256:1,>:2],max_split_size_mb:256", 0)
    assert found["roundup_power2_divisions:8"] == ("max_split_size_mb:9,roundup_power2_divisions:8", 0)
    assert found["empty_cache every 10 steps"] == (own, 10)
    assert [name for name, _, _ in _settings("expandable_segments:True")].count("expandable_segments:True") == 1


def test_a_setting_counts_its_failures_and_calls() -> None:
    none = {"failed_step": -1, "failed_event": -1, "requested_bytes": 0, "allocated_bytes": 0, "reserved_bytes": 0}
    failed = {**none, "failed_step": 2, "failed_event": 7, "reserved_bytes": 90}
    whole = np.array([[5, 50, 0, 10], [5, 60, 0, 12], [5, 60, 0, 14], [5, 60, 0, 16]])
    part = np.array([[5, 70, 0, 20], [5, 80, 0, 24], [0, 0, 0, 0], [0, 0, 0, 0]])
    found = _setting("as recorded", [(none, whole), (failed, part)], 4)
    assert (found.failed_steps, found.peak_reserved_bytes) == ([3], 90)
    assert found.num_mallocs == (16 + 24) / (4 + 2)


def test_steps_are_named_in_the_recorded_cycle_or_as_often_as_is_said() -> None:
    recorded = ["", "", "evaluation", "", "", "evaluation", "", ""]
    assert name_sequence(recorded, {}, 7) == ["", "", "evaluation", "", "", "evaluation", ""]
    assert name_sequence(recorded, {"evaluation": 5}, 7) == ["", "", "", "", "evaluation", "", ""]
    assert name_sequence(["rollout", "", "rollout", ""], {"rollout": 3}, 4) == ["", "", "rollout", ""]
    assert name_sequence(["", "evaluation", "", "", ""], {}, 5) == [""] * 5  # once: no one knows how often


@pytest.mark.parametrize("text", ["evaluation", "=3", "evaluation=1", "evaluation=x", "save=3"])
def test_other_cycles_are_refused(text: str) -> None:
    assert parse_every(["evaluation=3"], ["", "evaluation"]) == {"evaluation": 3}
    with pytest.raises(JobError, match=r"NAME=N|is called 'save' \(names: evaluation\)"):
        parse_every([text], ["", "evaluation"])


def test_the_share_of_steps_that_fit_counts_each_sequence_up_to_its_first_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [(-1, -1), (2, 5), (-1, 0)]  # to the end; in its third step; before the first

    @contextmanager
    def player(playable: object, num_steps: int) -> Iterator[Any]:
        def play(rows: Iterable[Any], conf: str) -> Iterator[Any]:
            assert [len(lengths) for lengths in rows] == [10] * 3
            yield from (({"failed_step": step, "failed_event": event}, None) for step, event in ends)

        yield play

    monkeypatch.setattr(long_runs, "checked_player", player)
    kinds = [SimpleNamespace(length=length) for length in (100, 200)]
    playable: Any = SimpleNamespace(
        kinds=SimpleNamespace(steps=kinds), names=["", ""], alloc_conf="", steps=lambda names, lengths: lengths
    )
    assert fitting_steps(playable, 10, range(3)) == pytest.approx(12 / 14)
    playable.kinds.steps = kinds[:1]
    with pytest.raises(JobError, match="have one length"):
        fitting_steps(playable, 10, range(3))
