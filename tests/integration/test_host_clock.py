"""The host's clock of whole runs: bare steps see what the recorded step saw, and leave the recording as it was."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fakedist.analysis.recording import read_recording
from fakedist.results.opening import open_run
from tests.conftest import RunFakedist
from tests.support.runs import Profiled, ProfileOnce
from tests.support.virtual import on_virtual_gpu

JOB = Path(__file__).parent / "jobs" / "host_clock.py"
WAITS = JOB.with_name("host_waits.py")
STATIC_GRAPH = JOB.with_name("static_graph.py")
RAISES = JOB.with_name("raises_in_step.py")
RECORDED, BARE = 2, 25


def intervals_overlap(first: Profiled, second: Profiled) -> bool:
    """Return whether the intervals of two estimated steps overlap."""
    low, high = zip(
        *((run.summary["time"]["step_low_us"], run.summary["time"]["step_high_us"]) for run in (first, second)),
        strict=True,
    )
    return bool(max(low) <= min(high))


def steps_of(run: Profiled) -> list[Any]:
    return [json.loads(line)[1] for line in run.finished.stderr.splitlines() if line.startswith("[")]


@pytest.fixture(scope="module")
def clocked(profile_once: ProfileOnce) -> Profiled:
    return profile_once(JOB, "100", options=("--json", "--steps", str(RECORDED)))


def test_a_run_has_the_hosts_time_of_each_launch(clocked: Profiled) -> None:
    recording, launches = read_recording(clocked.path), clocked.table("launches")
    clock, at_end = recording.host_clock, recording.machine
    assert clock is not None
    assert at_end is not None
    assert clock.step == RECORDED
    assert 1 <= clock.num_repeats < BARE
    assert len(clock.dispatch_us) == 8 * len(launches)
    is_timed = launches["dispatch_us"].notna()
    assert is_timed.mean() > 0.9
    assert (launches["dispatch_us"][is_timed] >= 0).all()
    mean_us = clock.step_us / (1 - clock.spread)  # at most: median and mean differ by one standard deviation at most
    # A row's mean is of those steps that have it; in the others, its time is in the row after it, and so counts twice.
    assert 0 < launches["dispatch_us"].sum() <= 1.5 * mean_us
    assert 0 < clock.loading_us < clock.step_us <= clock.wall_us
    assert clock.linear_us > 0
    kernels = clocked.summary["kernels"]
    assert kernels["host"]["machine_us"] == clock.linear_us
    assert clock.pace_us > 0
    assert at_end.pace_us > 0


def test_bare_steps_see_what_the_recorded_step_saw(clocked: Profiled) -> None:
    steps = steps_of(clocked)
    assert RECORDED + 1 <= len(steps) <= RECORDED + BARE
    assert steps[0] != steps[1]
    assert all(step == steps[RECORDED - 1] for step in steps[RECORDED:])


def test_bare_steps_change_nothing_that_is_recorded(clocked: Profiled, profile_once: ProfileOnce) -> None:
    options = ("--json", "--steps", str(RECORDED))
    without = profile_once(JOB, "100", options=options, env={"FAKEDIST_HOST_CLOCK": "0"})
    assert len(steps_of(without)) == RECORDED
    assert without.note("host_not_measured") == ""
    for name in ("blocks", "events", "frames", "stacks", "groups", "calls", "invented", "largest", "segments", "work"):
        bare, table = clocked.table(name), without.table(name)
        times = [column for column in table if column.endswith("_us")]  # on the clock of this machine
        assert bare.drop(columns=times).equals(table.drop(columns=times)), name


def test_a_script_that_ends_by_itself_has_the_clock_of_the_recorded_step(
    clocked: Profiled, profile_once: ProfileOnce
) -> None:
    run = profile_once(JOB, "2", options=("--json", "--steps", "2"))
    clock, bare = read_recording(run.path).host_clock, read_recording(clocked.path).host_clock
    assert clock is not None
    assert bare is not None
    assert clock.is_recorded
    assert not bare.is_recorded
    assert clock.step == RECORDED
    assert (run.table("launches")["dispatch_us"] >= 0).all()
    assert run.summary["kernels"]["host"]["source"] == "measured"
    assert "the script or --until ended before" in run.note("host_measured_as_recorded")
    assert run.note("host_not_measured") == ""
    assert intervals_overlap(run, clocked)


def test_a_script_that_ends_in_a_bare_step_was_stopped_all_the_same(profile_once: ProfileOnce) -> None:
    run = profile_once(JOB, "3", options=("--json", "--steps", "2"))
    assert run.finished.code == 0
    assert json.loads((run.path / "run.json").read_text())["exit"]["outcome"] == "stopped"
    clock = read_recording(run.path).host_clock
    assert clock is not None
    assert (clock.is_recorded, clock.num_repeats) == (False, 1)


def test_a_script_that_ends_by_itself_runs_a_second_time_where_that_is_asked(
    clocked: Profiled, profile_once: ProfileOnce
) -> None:
    run = profile_once(JOB, "3", options=("--json", "--until", "end", "--clock-run"))
    assert len(steps_of(run)) == 3  # the second run prints nothing
    clock = read_recording(run.path).host_clock
    assert clock is not None
    launches = run.table("launches")
    assert {clock.step} == set(launches["step"])
    assert (clock.is_second_run, clock.is_recorded) == (True, False)
    assert launches["dispatch_us"].notna().mean() > 0.9
    assert run.note("host_measured_as_recorded") == ""
    said = {note["code"]: note["text"] for note in run.summary["kernels"]["notes"]}
    assert "of a second run of the script" in said["host_time"]
    assert intervals_overlap(run, clocked)


def test_a_module_that_runs_once_before_the_bare_steps_begins_none(profile_once: ProfileOnce, tmp_path: Path) -> None:
    """As the layers that are captured after the first steps."""
    script = JOB.read_text().replace("loader = ", "once = nn.Linear(16, 1).cuda()\nloader = ", 1)
    script = script.replace("    chosen = ", "    if step == 2:\n        once(x)\n    chosen = ", 1)
    (job := tmp_path / "runs_once.py").write_text(script)
    clock = read_recording(profile_once(job, "100", options=("--json", "--steps", "2")).path).host_clock
    assert clock is not None
    assert not clock.is_recorded
    assert clock.num_repeats > 1


def test_an_error_in_a_bare_step_is_not_the_scripts(profile_once: ProfileOnce) -> None:
    run = profile_once(RAISES, "3", options=("--json", "--steps", "2"))
    assert run.finished.code == 0
    assert "Traceback" not in run.finished.stderr
    assert json.loads((run.path / "run.json").read_text())["exit"]["outcome"] == "stopped"
    note = run.note("host_measured_as_recorded")
    assert "the error is not the script's" in note
    assert "the loss of this step is broken" in note


def test_memory_that_only_a_bare_step_lacks_is_not_the_ranks(profile_once: ProfileOnce) -> None:
    run = profile_once(JOB.with_name("grows_when_bare.py"), "2", options=("--json", "--steps", "2"))
    assert run.finished.code == 0
    assert json.loads((run.path / "run.json").read_text())["exit"]["outcome"] == "stopped"
    assert "OutOfMemoryError" in run.note("host_measured_as_recorded")
    lacking = profile_once(JOB.with_name("grows_when_bare.py"), "1", options=("--json", "--steps", "2"))
    assert lacking.finished.code == 4


@pytest.fixture(scope="module")
def waiting(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    path = tmp_path_factory.mktemp("waiting") / "run"
    options = ("--world-size", "8", "--rank", "0", "--device", "virtual", "--json", "--steps", str(RECORDED))
    scaled = {"CUDA_SCALE_LAUNCH_QUEUES": "4x"}
    return Profiled(path, run_fakedist("profile", *options, "-o", path, WAITS, page=True, env=scaled))


def test_each_synchronize_outside_of_operations_has_its_line(waiting: Profiled) -> None:
    marked = {
        f"synchronize ({line.rpartition('# ')[2]})": number
        for number, line in enumerate(WAITS.read_text().splitlines(), 1)
        if line.endswith(("# device", "# event", "# stream"))
    }
    assert len(marked) == 3
    waits = [wait for wait in waiting.summary["time"]["host_waits"] if wait["kind"] == "synchronize"]
    assert {wait["operation"]: int(wait["line"].partition(" (")[0].rpartition(":")[2]) for wait in waits} == marked
    assert not any(wait["is_after"] for wait in waits)


def test_garbage_and_batches_of_a_real_run_are_told_apart(waiting: Profiled, run_fakedist: RunFakedist) -> None:
    clock, time = read_recording(waiting.path).host_clock, waiting.summary["time"]
    assert clock is not None
    scale = waiting.summary["kernels"]["host"]["scale"]
    assert 0 < time["collector_us"] == pytest.approx(clock.collector_us * scale)
    assert 0 < time["loading_us"] == pytest.approx(clock.loading_us * scale)
    shown = run_fakedist("report", waiting.path, "--section", "time").stdout
    for text in (shown, (waiting.path / "report.html").read_text()):
        assert "of these, data loading" in text
        assert "without garbage collection: " in text
    assert waiting.summary["kernels"]["host"]["queue_depth"] == 4094


def test_each_thread_of_the_host_has_a_lane(waiting: Profiled) -> None:
    launches = waiting.table("launches")
    threads = launches.groupby("phase", observed=True)["thread"].unique().map(sorted).to_dict()
    assert threads["forward"] == threads["optimizer"] == [0.0]
    (backward,) = threads["backward"]
    assert backward > 0
    events = json.loads(gzip.decompress((waiting.path / "trace.json.gz").read_bytes()))["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    phases: dict[str, set[str]] = {}
    for event in events:
        if event.get("cat") == "host":
            phases.setdefault(lanes[event["tid"]], set()).add(event["args"]["phase"])
    assert phases == {
        "host: operations and waits": {"forward", "optimizer", "other"},
        f"host, thread {backward:.0f}: operations and waits": {"backward"},
    }


def test_the_hosts_own_times_are_scaled_again_for_another_host(waiting: Profiled, run_fakedist: RunFakedist) -> None:
    priced = run_fakedist("time", waiting.path, "--host", "2", "--json").json()
    clock = read_recording(waiting.path).host_clock
    assert clock is not None
    for name in ("collector_us", "loading_us"):
        assert priced["time"][name] == pytest.approx(2 * getattr(clock, name))
    assert priced["kernels"]["host"]["queue_depth"] == 4094
    faster = open_run(waiting.path).priced_for(host="2", what_if="host=2x").time.summary()
    assert faster.loading_us == pytest.approx(clock.loading_us)


def test_a_launch_takes_no_known_value_away_while_the_clock_runs() -> None:
    """A bare step does not look for what a kernel overwrites: that took longer than the script itself."""
    found = on_virtual_gpu(
        """
        import ctypes
        library = ctypes.PyDLL(None)
        library.fakedist_losses.restype = ctypes.POINTER(ctypes.c_uint64)
        losses, known = library.fakedist_losses(), torch.ones(4, device="cuda")
        for is_on in (1, 0):
            library.fakedist_clock(is_on, ctypes.c_uint64(0))
            before = losses[0]
            known.mul_(2)
            found[str(is_on)] = losses[0] - before
        """
    )
    assert found == {"1": 0, "0": 1}


def test_ddp_reads_back_the_buckets_that_it_builds_in_a_bare_step(profile_once: ProfileOnce) -> None:
    # Its C++ takes the indices that it reads without a check. A loss has as many bytes as the size of the one bucket.
    run = profile_once(STATIC_GRAPH, "5", rank=3, options=("--json", "--steps", "2"))
    assert run.finished.code == 0
    assert run.note("host_not_measured") == ""
    assert read_recording(run.path).host_clock is not None


def test_buckets_that_ddp_builds_in_the_timed_step_are_in_no_bare_one(profile_once: ProfileOnce) -> None:
    run = profile_once(STATIC_GRAPH, "20", options=("--json", "--world-size", "8", "--steps", "3"))
    clock = read_recording(run.path).host_clock
    assert clock is not None
    assert not clock.is_recorded


def test_a_static_graph_is_recorded_with_its_last_buckets(profile_once: ProfileOnce) -> None:
    run = profile_once(STATIC_GRAPH, "3", rank=3)
    assert read_recording(run.path).steps[-1].step == 3
