"""Two ranks of a pipeline, recorded and exported: the traces have their launches, bytes and dependencies."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import fakedist
from fakedist.extras.chakra.chakra import COLLECTIVE, COMPUTE, RECEIVE, SEND
from tests.conftest import RunFakedist
from tests.extras.chakra.test_chakra import attributes, read
from tests.integration.test_job_time import profile_stages

pytestmark = pytest.mark.long

Exported = tuple[Path, dict[int, list[Any]]]


@pytest.fixture(scope="module")
def exported(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The folder with the runs and the traces, and the nodes of both stages."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "runs").symlink_to(profile_stages(run_fakedist)[0])
    made = run_fakedist("export", "runs/rank0", "runs/rank2", "-o", "traces", "--format", "chakra", cwd=folder)
    assert made.code == 0, made.stderr
    return folder, {rank: read(folder / "traces" / f"three_d.{rank}.et")[1] for rank in (0, 2)}


@pytest.mark.parametrize("rank", [0, 2])
def test_nodes_types_and_bytes_are_the_runs(exported: Exported, rank: int) -> None:
    run, nodes = fakedist.open(exported[0] / "runs" / f"rank{rank}"), exported[1][rank]
    launches, calls = run.table("launches"), run.table("calls").set_index("sequence")
    launched = launches[launches["work"] >= 0]
    assert len(nodes) == len(launched)
    own = calls.loc[launched.loc[launched["call"] >= 0, "call"]]
    types = Counter(node.type for node in nodes)
    assert types[SEND] == (own["operation"] == "send").sum() > 0
    assert types[RECEIVE] == (own["operation"] == "recv").sum() > 0
    assert types[COLLECTIVE] == (own["operation"] == "all_reduce").sum() > 0
    assert types[COMPUTE] == (launched["call"] < 0).sum()
    told = [attributes(node)["comm_size"] for node in nodes if node.type != COMPUTE]
    assert told == own[["bytes_in", "bytes_out"]].max(axis=1).tolist()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_nodes_dependencies_come_before_it_and_its_stream_is_kept(exported: Exported, rank: int) -> None:
    launches = fakedist.open(exported[0] / "runs" / f"rank{rank}").table("launches")
    stream = launches.loc[launches["work"] >= 0, "stream"].tolist()
    nodes = exported[1][rank]
    last: dict[int, int] = {}
    for node in nodes:
        assert all(each < node.id for each in [*node.data_deps, *node.ctrl_deps])
        if node.type == COMPUTE and stream[node.id] in last:
            assert last[stream[node.id]] in node.data_deps
        last[stream[node.id]] = node.id
    assert sum(node.duration_micros for node in nodes) > 0


def test_what_one_stage_sends_the_other_receives(exported: Exported) -> None:
    def transfers(rank: int, kind: int) -> list[tuple[int, ...]]:
        found = [attributes(node) for node in exported[1][rank] if node.type == kind]
        return [tuple(each[f"comm_{name}"] for name in ("src", "dst", "tag", "size")) for each in found]

    assert transfers(0, SEND) == transfers(2, RECEIVE) != []
    assert transfers(2, SEND) == transfers(0, RECEIVE) != []
    groups = json.loads((exported[0] / "traces" / "three_d.groups.json").read_text())
    assert all(groups[str(each[2])] == [0, 2] for each in transfers(0, SEND))
