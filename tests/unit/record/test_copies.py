"""What looking for copies among all objects asks of them."""

from __future__ import annotations

from fakedist.record.copies import _tensors_of


class Proxy:
    """As torch.distributed.reduce_op, and what loads a module late: whatever it is asked, it does something."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"asked for {name}")


def test_an_object_of_the_script_is_asked_for_nothing() -> None:
    assert _tensors_of(Proxy()) == []
