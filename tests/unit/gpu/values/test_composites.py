"""Operations on lists of tensors, where not all lists are as long."""

from __future__ import annotations

from fakedist.gpu.values.composites import Foreach
from fakedist.gpu.values.contents import Taint
from fakedist.gpu.values.host import Host


def test_a_list_of_states_that_an_optimizer_does_not_have_gets_no_taint() -> None:
    host = Host(0)  # _fused_adamw_ without amsgrad writes an empty list next to its full ones
    Foreach(host)._taint((), {0: Taint(())}, {0})
    assert not host.taints
