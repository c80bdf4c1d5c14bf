"""Lengths of answers, as ``--lengths`` gives them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fakedist.errors import JobError
from fakedist.extras.rl.schedule import NUM_DRAWS, request_lengths


def test_one_length_is_that_of_every_request_and_is_not_drawn() -> None:
    assert request_lengths("512", 3) == [[512, 512, 512]]


def test_a_distribution_is_drawn_several_times_and_always_the_same() -> None:
    draws = request_lengths("uniform:1:1024", 1000)
    assert len(draws) == NUM_DRAWS
    assert draws == request_lengths("uniform:1:1024", 1000)
    assert draws[0] != draws[1]
    every = np.array(draws)
    assert (every.min(), every.max()) == (1, 1024)
    assert every.mean() == pytest.approx(512.5, rel=0.02)


def test_a_lognormal_one_has_the_mean_it_is_given_and_is_cut_off() -> None:
    every = np.array(request_lengths("lognormal:1024:0.8", 20_000))
    assert every.mean() == pytest.approx(1024, rel=0.02)
    assert np.log(every).std() == pytest.approx(0.8, rel=0.02)
    assert np.array(request_lengths("lognormal:1024:0.8:2000", 20_000)).max() == 2000
    assert set(request_lengths("lognormal:100:0", 5)[0]) == {100}


def test_a_file_has_a_length_a_line(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("7\n1024\n\n3\n")
    assert request_lengths(str(file), None) == request_lengths(str(file), 3) == [[7, 1024, 3]]
    with pytest.raises(JobError, match="has 3 lengths, and --requests is 4"):
        request_lengths(str(file), 4)
    file.write_text("7\n0\n")
    with pytest.raises(JobError, match="line 2: '0' is not a number of tokens"):
        request_lengths(str(file), None)
    file.write_text("")
    with pytest.raises(JobError, match="has 0 lengths"):
        request_lengths(str(file), None)


@pytest.mark.parametrize(
    "text", ["0", "-3", "uniform:5", "uniform:9:3", "uniform:a:b", "lognormal:0:1", "lognormal:5:nan", "normal:3:4"]
)
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="--lengths"):
        request_lengths(text, 4)


def test_the_number_of_requests_is_needed() -> None:
    with pytest.raises(JobError, match="does not say how many requests there are"):
        request_lengths("512", None)
