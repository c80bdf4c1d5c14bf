"""``make gpu``: its pieces and their time."""

from __future__ import annotations

import pytest

from tests.gpu import confirm


def test_the_pieces_fit_into_30_minutes_and_each_into_8() -> None:
    limits = [piece.limit_s for piece in confirm.PIECES.values()]
    assert sum(limits) <= 30 * 60
    assert max(limits) <= 8 * 60


def test_a_piece_that_does_not_exist_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        confirm.main(["recording"])
    assert "there is no piece 'recording'" in capsys.readouterr().err
