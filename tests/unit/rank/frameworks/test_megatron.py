"""Megatron-LM's flags: a rank that loads no data knows whether to train."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fakedist.options import Job
from fakedist.rank.frameworks.adapting import adapted_frameworks
from fakedist.world.reroute import fake_world
from fakedist.world.tapes import Tapes


def training(**options: object) -> ModuleType:
    """``megatron.training.training``, with its function that builds loaders as a rank without data runs it."""
    module = ModuleType("megatron.training.training")
    args = SimpleNamespace(**options)

    def build_train_valid_test_data_loaders(provider: object) -> tuple[None, None, None]:
        flags = torch.tensor([0, 0, 0], dtype=torch.long)
        dist.broadcast(flags, 0)
        sizes = torch.tensor([0, 0], dtype=torch.long)
        dist.broadcast(sizes, 0)
        args.do = [bool(flag) for flag in flags], sizes.tolist()
        return None, None, None

    vars(module).update(get_args=lambda: args, build_train_valid_test_data_loaders=build_train_valid_test_data_loaders)
    return module


@pytest.fixture
def tapes() -> Iterator[Tapes]:
    found = Tapes(rank=3)
    with fake_world(Job(world_size=4, rank=3, target="x"), tapes=found):
        dist.init_process_group("gloo")
        yield found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"train_iters": 10, "eval_iters": 0}, [True, False, False]),
        ({"train_iters": 10, "eval_iters": 2}, [True, True, True]),
        ({"train_iters": 0, "eval_iters": 2, "skip_train": False}, [False, True, True]),
        ({"train_iters": None, "eval_iters": 0, "skip_train": True, "full_validation": True}, [True, True, True]),
    ],
)
def test_a_rank_without_data_gets_the_flags_that_follow_from_the_arguments(
    options: dict[str, object], expected: list[bool], tapes: Tapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = training(**options)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with adapted_frameworks():
        module.build_train_valid_test_data_loaders(None)
    assert module.get_args().do == (expected, [0, 0])
    assert [record.call for record in tapes.not_sent()] == ["broadcast"]  # of the sizes


def test_shards_that_do_not_make_up_the_whole_are_no_error_and_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("megatron.core.dist_checkpointing.validation")
    error = type("CheckpointingException", (Exception,), {})
    asked: list[object] = []

    def validate_sharding_integrity(shards: list[object]) -> None:
        asked.append(shards)
        raise {"wrong": error("Invalid access pattern"), "broken": ValueError("a shard without a key")}[shards[0]]

    vars(module).update(CheckpointingException=error, validate_sharding_integrity=validate_sharding_integrity)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with adapted_frameworks():
        module.validate_sharding_integrity(["wrong"])
        with pytest.raises(ValueError, match="without a key"):
            module.validate_sharding_integrity(["broken"])
    assert asked == [["wrong"], ["broken"]]  # the real job makes its calls too
