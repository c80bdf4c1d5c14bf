from __future__ import annotations

import pytest

from fakedist.errors import FakedistError
from fakedist.launcher.executors import ray_cluster
from fakedist.launcher.executors.choosing import make_executor
from fakedist.launcher.executors.local import LocalExecutor


@pytest.mark.parametrize(("on", "address"), [("ray", None), ("ray://head:10001", "ray://head:10001")])
def test_a_cluster_is_named_by_its_address(on: str, address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(ray_cluster, "RayExecutor", lambda *given: asked.append(given))
    make_executor(on, None, print)
    assert isinstance(make_executor("local", 3, print), LocalExecutor)
    assert asked == [(address, print)]


@pytest.mark.parametrize(
    ("on", "jobs", "told", "hint"),
    [
        ("slurm", None, "--on slurm: there is no such place", "--on local, --on ray or --on ray://HOST:10001"),
        ("ray", 2, "--jobs is for this machine, and the cluster runs as many as fit it", "leave out --jobs"),
    ],
)
def test_what_cannot_be_is_one_line(on: str, jobs: int | None, told: str, hint: str) -> None:
    with pytest.raises(FakedistError) as caught:
        make_executor(on, jobs, print)
    assert (caught.value.message, caught.value.hint, caught.value.exit_code) == (told, hint, 2)
