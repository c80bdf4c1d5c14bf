from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from fakedist.rank.frameworks.adapting import adapted_frameworks

SOURCE = """
from collections import namedtuple
Part = namedtuple("Part", "offsets sizes")
asked = []
def gather_and_compute_chunk_metadata(tensor):
    return Part((5 * tensor.rows,), (tensor.rows,))  # rank 5, and all before it like it
def validate_uneven_dtensor(tensor):
    asked.append(tensor)
    part = gather_and_compute_chunk_metadata(tensor)
    assert part.offsets[0] == 0 and part.sizes[0] == tensor.shape[0], "the rest is missing"
"""


@dataclass
class Shard:
    rows: int
    shape: tuple[int, ...] = (8,)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A framework that carries a copy of Megatron-FSDP, on the path and not yet imported."""
    folder = tmp_path / "carrier_of_fsdp" / "megatron_fsdp"
    folder.mkdir(parents=True)
    (folder / "uneven_dtensor.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "carrier_of_fsdp.megatron_fsdp.uneven_dtensor"
    for name in [name for name in sys.modules if name.startswith("carrier_of_fsdp")]:
        del sys.modules[name]


def import_(name: str) -> ModuleType:
    importlib.invalidate_caches()
    return importlib.import_module(name)


def test_a_module_imported_while_adapted_asks_but_does_not_stop(package: str) -> None:
    with adapted_frameworks():
        module = import_(package)
        shard = Shard(rows=3)
        module.validate_uneven_dtensor(shard)
        assert module.asked == [shard]
        assert module.gather_and_compute_chunk_metadata(shard) == ((5,), (3,))
        assert module.gather_and_compute_chunk_metadata(Shard(rows=0, shape=(8, 4))) == ((0,), (0,))
    with pytest.raises(AssertionError, match="the rest is missing"):
        module.validate_uneven_dtensor(shard)


def test_a_module_imported_before_is_adapted_too_and_others_are_left_alone(package: str) -> None:
    finders = list(sys.meta_path)
    with adapted_frameworks():
        parent = import_(package.rpartition(".")[0])
        assert "fakedist" not in type(parent.__spec__.loader).__module__
    module = import_(package)
    original = module.validate_uneven_dtensor
    with adapted_frameworks():
        module.validate_uneven_dtensor(Shard(rows=3))
    assert module.validate_uneven_dtensor is original
    assert sys.meta_path == finders


def test_modules_that_ask_ranks_which_run_keep_their_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.distributed.parallel_state")
    asks = module.in_the_same_node_as = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with adapted_frameworks(has_peers=True):
        assert module.in_the_same_node_as is asks
    with adapted_frameworks():
        assert module.in_the_same_node_as is not asks
