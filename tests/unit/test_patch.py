from __future__ import annotations

from types import SimpleNamespace

import pytest

from fakedist.errors import RecordingError
from fakedist.patch import patched, present


def test_the_original_is_back_afterwards_also_after_an_error() -> None:
    owner = SimpleNamespace(value=1)

    def fail_while_patched() -> None:
        with patched(owner, "value", 2) as original:
            assert (owner.value, original) == (2, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_while_patched()
    assert owner.value == 1


def test_a_target_that_is_missing_is_an_error_that_names_it() -> None:
    import torch.cuda

    with pytest.raises(RecordingError, match=r"torch \S+ has no torch\.cuda\._gone") as error:
        present(torch.cuda, "_gone")
    assert error.value.hint == "pip install torch==2.15.0"
    with pytest.raises(RecordingError), patched(torch.cuda, "_gone", None):
        pass
    assert not hasattr(torch.cuda, "_gone")
