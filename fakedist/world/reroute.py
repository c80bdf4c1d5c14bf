"""Every request for a process group becomes ours: any backend, any way of meeting, any subgroup."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from fakedist.job import Job
from fakedist.world.arrivals import Arrivals
from fakedist.world.ledger import LedgerLike, NullLedger
from fakedist.world.objects import faked_objects
from fakedist.world.patch import patched
from fakedist.world.process_group import RankGroup
from fakedist.world.store import RankStore

_NON_MEMBER = c10d.GroupMember.NON_GROUP_MEMBER


@contextmanager
def fake_world(
    job: Job, ledger: LedgerLike | None = None, is_undefined: Callable[[torch.Tensor], bool] | None = None
) -> Iterator[None]:
    """Let this process be one rank of a job whose other ranks do not exist.

    Args:
        job: World size, rank, seed and whether collectives move values.
        ledger: Where groups and calls are written down; None writes nothing.
        is_undefined: Says that a device tensor holds nothing.

    Raises:
        RecordingError: This torch lacks something that must be replaced.
    """
    world = _World(job, ledger or NullLedger(), is_undefined)
    with ExitStack() as stack:
        stack.enter_context(patched(c10d, "_new_process_group_helper", world.new_process_group))
        world.new_group = stack.enter_context(patched(c10d, "_new_group_with_tag", world.new_group_with_tag))
        stack.enter_context(patched(c10d, "rendezvous", world.rendezvous))
        for owner in (c10d, dist, device_mesh):
            stack.enter_context(patched(owner, "split_group", world.split_group))
        for name in ("is_nccl_available", "is_mpi_available", "is_ucc_available", "is_gloo_available"):
            for owner in (c10d, dist):
                stack.enter_context(patched(owner, name, lambda: True))
        stack.enter_context(faked_objects(world.write_object_call))
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class _World:
    """Makes the groups of one rank."""

    def __init__(self, job: Job, ledger: LedgerLike, is_undefined: Callable[[torch.Tensor], bool] | None) -> None:
        self._job = job
        self._ledger = ledger
        self._arrivals = Arrivals(job.seed, is_undefined) if job.collectives == "values" else None
        self._store = RankStore(job.world_size)
        self._helper = inspect.signature(c10d._new_process_group_helper)
        self._tagged = inspect.signature(c10d._new_group_with_tag)
        self.new_group: Callable[..., Any] = c10d._new_group_with_tag

    def rendezvous(self, url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[Any]:
        """Meet nobody: the store, this rank and the world size."""
        yield (
            self._store,
            rank if rank >= 0 else self._job.rank,
            world_size if world_size >= 0 else self._job.world_size,
        )

    def new_group_with_tag(self, *args: Any, **kwargs: Any) -> Any:
        """A subgroup; one without this rank costs nothing but its number."""
        given = self._tagged.bind(*args, **kwargs).arguments
        ranks = given.get("ranks")
        if ranks is not None:
            ranks = ranks if isinstance(ranks, (list, tuple, range)) else list(ranks)
            if len(ranks) and dist.get_rank() not in ranks and min(ranks) >= 0 and max(ranks) < dist.get_world_size():
                if not given.get("use_local_synchronization"):
                    c10d._process_group_name(ranks, use_hashed_name=False)  # the next group's name counts this one
                return _NON_MEMBER
        return self.new_group(*args, **kwargs)

    def new_process_group(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """What ``_new_process_group_helper`` does, with our group in it."""
        bound = self._helper.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        ranks, name, tag = given["global_ranks_in_group"], given["group_name"], given["pg_tag"]
        if name in c10d._world.pg_names.values():
            raise ValueError("The specified group name has already been created, please use a different group name")
        if tag and (existing := c10d._find_pg_by_ranks_and_tag(tag, ranks)):
            return existing, c10d._world.pg_map[existing][1]
        if ranks and dist.get_rank() not in ranks:
            return _NON_MEMBER, None
        size = given["group_size"] if given["group_size"] > 0 else self._job.world_size
        rank = given["group_rank"] if (given["group_rank"] or 0) >= 0 else self._job.rank
        backend = str(given["backend"])
        group = RankGroup((rank or 0, size), backend, self._arrivals, self._ledger, given.get("backend_options"))
        if given["device_id"]:
            group.bound_device_id = given["device_id"]
        description = given["group_desc"] or "undefined"
        number = self._ledger.add_group(str(name), description, ranks or range(size), rank or 0, backend)
        group.named(name, description, number)
        store = c10d.PrefixStore(f"{name}/", self._store)
        _register(group, (backend, store), str(name), tag)
        return group, store

    def split_group(
        self,
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        **_: Any,
    ) -> Any:
        """The part of ``parent_pg`` with this rank in it; ``split_ranks`` are ranks of the parent."""
        if not split_ranks:
            raise ValueError("split_ranks cannot be None or empty")
        of_parent = dist.get_process_group_ranks(parent_pg or c10d._get_default_group())
        mine: Any = None
        for part in split_ranks:
            group = dist.new_group([of_parent[rank] for rank in part], timeout=timeout, group_desc=group_desc)
            mine = group if group is not _NON_MEMBER else mine
        return mine

    def write_object_call(self, operation: str, group: Any, num_bytes: int) -> None:
        """Write an object collective into the ledger; its bytes are those of the pickled object."""
        pg = group or c10d._get_default_group()
        self._ledger.write(operation, getattr(pg, "number", 0), [torch.empty(num_bytes, dtype=torch.uint8)], [])


def _register(group: RankGroup, backend_and_store: tuple[str, Any], name: str, tag: str | None) -> None:
    """The end of ``_new_process_group_helper``: what torch.distributed keeps about a group."""
    distributed: Any = c10d  # what follows is not in its types
    world = distributed._world
    world.pg_map[group] = backend_and_store
    world.pg_names[group] = name
    distributed._register_process_group(name, group)
    world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(backend_and_store[0])))
    if tag:
        tag = f"user:{tag}"
    else:
        tag = f"ptd:{name}"
        world.tags_to_pg.setdefault("", []).append(group)
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
