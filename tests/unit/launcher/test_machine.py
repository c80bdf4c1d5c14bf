"""How much memory this machine, or a control group on it, has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakedist.launcher.machine import Memory, memory

GIB = 1 << 30
_MEMINFO = "MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {free} kB\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    """A machine with 12 of 24 GiB left, and these files besides."""
    meminfo = _MEMINFO.format(total=24 << 20, free=12 << 20)
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(folder: str, names: str, limit: int | str, used: int, droppable: int = 0) -> dict[str, str]:
    """The files of a control group; their ``names`` and that of what the kernel can drop, separated by spaces."""
    of_limit, of_used, of_droppable = names.split()
    stat = f"anon 5\n{of_droppable} {droppable}\n"
    return {f"{folder}/{of_limit}": f"{limit}\n", f"{folder}/{of_used}": f"{used}\n", f"{folder}/memory.stat": stat}


V1, V2 = "memory.limit_in_bytes memory.usage_in_bytes total_inactive_file", "memory.max memory.current inactive_file"


def test_without_control_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert memory(machine(tmp_path, {})) == Memory(12 * GIB, 24 * GIB)


@pytest.mark.parametrize(("top", "line", "names"), [("memory", "4:cpu,memory:", V1), (".", "0::", V2)])
def test_the_group_with_the_least_left_counts_without_what_the_kernel_can_drop(
    tmp_path: Path, top: str, line: str, names: str
) -> None:
    top = f"sys/fs/cgroup/{top}"
    files = {"proc/self/cgroup": f"9:pids:/job/step\n{line}/job/step\n"}
    files |= group(f"{top}/job/step", names, 8 * GIB, 3 * GIB)
    files |= group(f"{top}/job", names, 10 * GIB, 9 * GIB, droppable=2 * GIB)
    assert memory(machine(tmp_path, files)) == Memory(3 * GIB, 10 * GIB)


def test_a_container_sees_its_own_group_at_the_top_and_a_group_may_have_no_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/of/the/host\n"} | group("sys/fs/cgroup", V2, 4 * GIB, GIB)
    assert memory(machine(tmp_path, files)) == Memory(3 * GIB, 4 * GIB)
    assert memory(machine(tmp_path, group("sys/fs/cgroup", V2, "max", GIB))) == Memory(12 * GIB, 24 * GIB)


@pytest.mark.parametrize(
    ("left", "is_nearly_gone"),
    [
        (Memory(2 * GIB - 1, 1024 * GIB), True),
        (Memory(2 * GIB, 1024 * GIB), False),
        (Memory(GIB - 1, 16 * GIB), True),
        (Memory(GIB, 16 * GIB), False),
    ],
)
def test_memory_is_nearly_gone_below_a_sixteenth_or_two_gib(left: Memory, is_nearly_gone: bool) -> None:
    assert left.is_nearly_gone == is_nearly_gone
