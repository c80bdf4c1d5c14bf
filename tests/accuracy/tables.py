"""The tables of docs/accuracy/results.md: each function makes one of the data of a file in docs/accuracy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

GIB, MIB = 1 << 30, 1 << 20
Data = dict[str, Any]


def many_processes(data: Data) -> str:
    """A line for each job, number of ranks and device: the largest rank's peaks, the largest difference of any."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in data["rows"]:
        groups[row["job"], row["backend"], row["num_ranks"], row["faked_on"]].append(row)
    lines = []
    jobs = list(dict.fromkeys(row["job"] for row in data["rows"]))
    order = sorted(groups, key=lambda key: (key[1] != "nccl", jobs.index(key[0]), *key[2:]))
    for job, backend, num_ranks, faked_on in order:
        group = groups[job, backend, num_ranks, faked_on]
        largest = max(group, key=lambda row: row["real_allocated_bytes"])
        differences = (row[key] for row in group for key in ("allocated_difference_bytes", "reserved_difference_bytes"))
        other = sum(row["first_other_event"] >= 0 for row in group)
        events = f"{other} ranks" if other else f"none of {sum(row['num_events'] for row in group):,}"
        phases = f"{sum(row['phases_differing'] for row in group)} of {sum(row['num_phase_figures'] for row in group)}"
        cause = next((row["cause"] for row in group if row["cause"]), "")
        lines.append(
            (job, backend, num_ranks, faked_on, f"{largest['real_allocated_bytes']:,}",
             f"{largest['real_reserved_bytes']:,}", f"{max(differences, key=abs):+,}", phases, events, cause)
        )  # fmt: skip
    columns = ("job", "backend", "ranks", "faked on", "allocated, bytes", "reserved, bytes", "difference", "phases",
               "events", "cause")  # fmt: skip
    return _table(data, columns, lines)


def golden_loads(data: Data) -> str:
    """A load a row: the last rank's peaks in its draws, without workspaces, less the golden one."""
    rows = [
        (
            f"`{row['load']}`",
            "{:.2f} to {:.2f}".format(*row["shares"]),
            *(f"{left / 2**20:+,.0f} MiB" for left in row["left_bytes"]),
            f"{row['below']} of {row['draws']}",
        )
        for row in data["rows"]
    ]
    columns = ("load", "tokens, x the mean", "left, least", "left, median", "left, most", "below the golden peak")
    return _table(data, columns, rows)


def host_fits(data: Data) -> str:
    """A line for each half of a host's rows: the numbers that were fitted on the first, and the errors with them."""
    lines = []
    for row in data["rows"]:
        errors = list(row["errors"].values())
        broken = ", ".join(f"{name}: the host takes {over:.2f} of it" for name, over in row["broken"].items())
        lines.append(
            (row["host"], f"{row['dispatch_us']:g} us", f"{row['launch_us']:g} us", row["half"], len(errors),
             f"{median(map(abs, errors)):.1%}", f"{min(errors):+.0%} to {max(errors):+.0%}",
             f"{row['num_bounds']}, not kept: {broken or 'none'}")
        )  # fmt: skip
    columns = (
        "host",
        "forward of Linear, without CUDA's calls",
        "launch in a step",
        "half",
        "rows",
        "median",
        "errors",
        "bounds",
    )
    return _table(data, columns, lines)


def interval_widths(data: Data) -> str:
    """A line for each width: the factor, and how many of each half are inside with it and without."""

    def inside(row: dict[str, Any], half: str) -> str:
        held, number = row[f"{half}_inside"], row[f"{half}_rows"]
        return f"{held} of {number} ({held / number:.0%}), before {row[f'{half}_inside_before']}"

    lines = [
        (row["kind"], f"x {row['factor']:g}", *(inside(row, half) for half in ("fitted", "judged")))
        for row in data["rows"]
    ]
    return _table(data, ("width of", "factor", "fitted half, inside", "judged half, inside"), lines)


def recordings(data: Data) -> str:
    """A line for each job on the real GPU: its peaks, and what differs on the virtual GPU and under the recording."""
    lines = [
        (row["job"], f"{row['num_events']:,}", f"{row['allocated_bytes']:,}", f"{row['reserved_bytes']:,}",
         f"{row['reserved_bytes'] - row['allocated_bytes']:,}", _difference(row, "virtual"),
         _difference(row, "recorded"))
        for row in data["rows"]
    ]  # fmt: skip
    columns = ("job", "events", "allocated, bytes", "reserved, bytes", "fragmentation, bytes", "virtual GPU",
               "recorded")  # fmt: skip
    return _table(data, columns, lines)


def examples(data: Data) -> str:
    """A line for each example under ``fakedist profile``: on the real GPU, and what differs on the virtual one."""
    lines = [
        (f"`{row['command']}`", f"{row['num_events']:,}", f"{row['allocated_bytes']:,}", f"{row['reserved_bytes']:,}",
         f"{row['reserved_bytes'] - row['allocated_bytes']:,}", _difference(row, "virtual"))
        if not row["error"] else (f"`{row['command']}`", "", "", "", "", row["error"])
        for row in data["rows"]
    ]  # fmt: skip
    columns = ("example", "events", "allocated, bytes", "reserved, bytes", "fragmentation, bytes", "virtual GPU")
    return _table(data, columns, lines)


def _difference(row: dict[str, Any], side: str) -> str:
    """A cell with the differences of the other side."""
    verdict = row[f"{side}_verdict"]
    if verdict in ("same", "order"):
        return "same" if verdict == "same" else "same, frees in another order"
    if verdict not in ("events", "statistics"):
        return str(verdict)
    allocated, reserved = row[f"{side}_allocated_difference_bytes"], row[f"{side}_reserved_difference_bytes"]
    peaks = "equal peaks" if not allocated and not reserved else f"{allocated:+,}, reserved {reserved:+,}"
    return f"{peaks}; {row[f'{side}_reason']}".replace("|", "/")


def out_of_memory(data: Data) -> str:
    """A line for each limit: where the job failed on the real GPU, where on the virtual one."""
    lines = []
    for row in data["rows"]:
        real, virtual = row["real"], row["virtual"]
        same = "the same" if _failure(real) == _failure(virtual) else _failure(virtual)
        more = f"{virtual['peak_reserved_bytes'] - real['peak_reserved_bytes']:+,}" if real and virtual else ""
        lines.append((row["limit"], f"{row['gib']} GiB", _failure(real), same, more))
    return _table(data, ("limited by", "to", "real GPU", "virtual GPU", "its reserved peak, bytes"), lines)


def _failure(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not run"
    if not found["requested_bytes"]:
        return f"fits, {found['num_allocations']:,} allocations"
    return (
        f"step {found['step']}, {found['phase']}, allocation {found['num_allocations']:,}: "
        f"{found['requested_bytes']:,} bytes"
    )


def outside(data: Data) -> str:
    """A line for each thing that was used: how much more the device held outside the allocator."""
    lines = []
    before = 0
    for row in data["rows"]:
        held = row["used_bytes"] - row["reserved_bytes"]
        lines.append((row["after"], f"{held / MIB:,.0f} MiB", f"{(held - before) / MIB:+,.0f} MiB"))
        before = held
    return _table(data, ("after", "device used less reserved", "more than before"), lines)


def estimates(data: Data) -> str:
    """A line for each job, its families, its worst layer: measured and estimated kernel times."""
    lines = [
        (row["job"], row["what"], _ms(row["measured_us"]), _ms(row["estimated_us"]),
         _share(row["estimated_us"], row["measured_us"]))
        for row in data["rows"]
    ]  # fmt: skip
    return _table(data, ("job", "what", "measured", "estimated", "off by"), lines)


def steps(data: Data) -> str:
    """A line for each job."""
    lines = []
    for row in data["rows"]:
        sides = [
            f"{_ms(row[f'{side}_us'])} ({row[f'{side}_low_us'] / 1e3:.3f} to {row[f'{side}_high_us'] / 1e3:.3f})"
            f" {_share(row[f'{side}_us'], row['step_us'])}"
            for side in ("this", "usual")
        ]
        behind = f"{row['behind_us'] / 1e3:.1f} ms"
        lines.append((row["job"], _ms(row["step_us"]), f"{row['spread']:.1%}", behind, *sides, _ms(row["kernels_us"])))
    columns = ("job", "measured", "spread", "GPU behind the host", "this host", "usual host", "kernels, estimated")
    return _table(data, columns, lines)


def calls(data: Data) -> str:
    """A line for each operation."""
    lines = [
        (row["operation"], f"{row['real_us']:.2f} us", f"{row['real_median_us']:.2f} us",
         *(("-", "-") if row["virtual_us"] is None else
           (f"{row['virtual_us']:.2f} us", f"{row['real_us'] - row['virtual_us']:.2f} us")))
        for row in data["rows"]
    ]  # fmt: skip
    return _table(data, ("operation", "GPU, least", "GPU, median", "virtual GPU, least", "difference"), lines)


def _ms(us: float) -> str:
    return f"{us / 1e3:.3f} ms"


def _share(us: float, of: float) -> str:
    return f"{us / of - 1:+.1%}" if of else "-"


def _table(data: Data, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = data["head"]
    gpu = "virtual GPU" if head["gpu"] == "virtual" else head["gpu"]
    driver = f", driver {head['driver']}" if head.get("driver") else ""
    lines = [
        f"{head['date']}, {gpu}{driver}, torch {head['torch']}, Python {head['python']}:",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]
    failed = data["head"].get("failed", [])
    return "\n".join([*lines, *([""] if failed else []), *(f"Not in the table: {text}." for text in failed)])


@dataclass(frozen=True)
class GpuTable:
    """A table that only a machine with a GPU can fill.

    Attributes:
        title: Its heading.
        shows: Its figures, in a sentence or two.
        piece: The piece of ``make gpu`` that measures them.
        table: Makes the table of the data.
    """

    title: str
    shows: str
    piece: str
    table: Callable[[Data], str]


#: Tables of the data that any machine can make.
TABLES: dict[str, Callable[[Data], str]] = {
    "many-processes-virtual": many_processes,
    "golden-loads": golden_loads,
    "host-fits": host_fits,
    "interval-widths": interval_widths,
}
#: Tables that wait for a GPU until there are data.
GPU_TABLES = {
    "gpu-recordings": GpuTable(
        "Event by event",
        "36 jobs on the GPU against the same jobs on the virtual GPU, and against themselves under `fakedist profile "
        "--device cuda`: peaks, fragmentation (peak reserved less peak allocated), and the first event that differs.",
        "recordings",
        recordings,
    ),
    "gpu-examples": GpuTable(
        "The examples", "The same of the examples, under `fakedist profile` on both.", "examples", examples
    ),
    "many-processes-cuda": GpuTable(
        "A faked rank against real processes",
        "Real processes that share the GPU, against each of their ranks, faked on that GPU and on the virtual GPU.",
        "processes",
        many_processes,
    ),
    "gpu-out-of-memory": GpuTable(
        "Too little memory",
        "Where a transformer that trains on ever longer sequences fails, as memory shrinks in steps of 1 GiB: by the "
        "allocator's own limit (`set_per_process_memory_fraction`), or because the rest of the device is taken outside "
        "the allocator, so that `cudaMalloc` refuses. Where they differ, autocast freed its casts in another "
        "order, which follows from addresses of the host, so that other blocks lie between free ones.",
        "out-of-memory",
        out_of_memory,
    ),
    "gpu-outside": GpuTable(
        "Outside the allocator",
        "Bytes in use on the device, less what the allocator reserved, after the first use of each thing that a job "
        "may use.",
        "outside",
        outside,
    ),
    "gpu-steps": GpuTable(
        "Steps",
        "The wall time of a step without fakedist, and estimated, each with its interval: for the machine's own host, "
        "whose processor recorded the run, and for the usual host of its GPU.",
        "host",
        steps,
    ),
    "gpu-calls": GpuTable(
        "CUDA's own calls",
        "The host's time for operations of torch whose CUDA calls return at once, on the GPU and on the virtual GPU of "
        "the same machine: the difference is CUDA's.",
        "host",
        calls,
    ),
    "gpu-estimates": GpuTable(
        "Kernel times, estimated",
        "Estimated on the virtual GPU against measured: in total, each family with 2% or more, and the layer that is "
        "furthest off.",
        "times",
        estimates,
    ),
}
