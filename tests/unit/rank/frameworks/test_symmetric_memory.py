from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory

from fakedist.errors import WorldError

Enter = Callable[..., Any]


def test_symmetric_memory_is_refused_by_name(enter_world: Enter) -> None:
    enter_world(4, 1)
    with pytest.raises(WorldError, match=r"symmetric memory .* writes into other ranks' memory"):
        symmetric_memory.rendezvous(torch.zeros(4), "0")
