import math
from dataclasses import replace

import pytest

from fakedist.report.content.wording import note_texts, num_warnings, peak_size, remedy_text, sizes_figures
from fakedist.results.verdict import limit_text, limits_text, relative_time, short_line
from fakedist.rundir.notes import Note
from fakedist.rundir.step_time import GroupTime, PathPart, StepLimit, TimeGain
from fakedist.rundir.summary import Remedy, StepPeak
from tests.unit.report.handmade import summary_of_nothing
from tests.unit.results.test_comparison import step


@pytest.mark.parametrize(
    ("line", "short"),
    [
        ("/job/train.py:7 (main)", "train.py:7 (main)"),
        ("/env/lib/python3.11/site-packages/torch/nn/modules.py:3 (forward)", "torch/nn/modules.py:3 (forward)"),
        ("/usr/lib/python3.11/runpy.py:88 (_run_code)", "python3.11/runpy.py:88 (_run_code)"),
        (f"/home/me/.cache/inductor/3x/c{'a7' * 25}q.py:2 (call)", f"c{'a7' * 25}q.py:2 (call)"),
        ("/elsewhere/config.py:1 (<module>)", "/elsewhere/config.py:1 (<module>)"),
    ],
)
def test_files_are_named_from_where_the_command_was_given_or_where_packages_are(line: str, short: str) -> None:
    assert short_line(line, "/job") == short


@pytest.mark.parametrize(
    ("cwd", "text"), [("/home/me", "at train.py:3"), ("/", "at /home/me/train.py:3"), ("", "at /home/me/train.py:3")]
)
def test_notes_name_files_from_where_the_command_was_given(cwd: str, text: str) -> None:
    assert note_texts([Note("told", "at /home/me/train.py:3")], cwd) == [text]


def test_the_gravest_notes_come_first_and_are_counted() -> None:
    codes = ("stopped_before_the_end", "went_on_without_memory", "other", "no_last_record")
    notes = [Note(code, code) for code in codes]
    assert note_texts(notes, "") == ["no_last_record", "went_on_without_memory", "stopped_before_the_end", "other"]
    assert num_warnings(notes) == 2


GAINS = [
    TimeGain("b200, fabric dgx-b200-ndr", "--gpu b200", 50.0),
    TimeGain("twice the NIC bandwidth", "--what-if bandwidth=2x", 93.2),
    TimeGain("twice the NVLink bandwidth", "--what-if bandwidth=nvlink:2x", 98.5),
    TimeGain("a host that launches in no time", "--what-if no-host-waits", 99.99),
]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        # What is exposed longest does not limit the step: its critical path does, summed by group.
        (
            [("collectives", "dp", 40.0), ("collectives", "dp", 32.0), ("kernels", "", 28.0)],
            "limited by dp over the NICs: 72% of the critical path; twice the NIC bandwidth: -6.8%",
        ),
        (
            [("collectives", "tp", 60.0), ("kernels", "", 40.0)],
            "limited by tp over the links of a node: 60% of the critical path; twice the NVLink bandwidth: -1.5%",
        ),
        (
            [("collectives", "dp", 40.0), ("kernels", "", 30.0), ("kernels", "", 30.0)],
            "limited by kernels (memory 75%): 60% of the critical path; b200, fabric dgx-b200-ndr: -50.0%",
        ),
        (
            [("host", "", 90.0), ("kernels", "", 10.0)],
            "limited by late launches of the host: 90% of the critical path; a host that launches in no time: 0.0%",
        ),
        ([("idle", "", 90.0)], "limited by waits for an unknown reason: 90% of the critical path"),
        ([], ""),
    ],
)
def test_an_older_run_is_limited_by_the_longest_part_of_its_path(path: list[tuple[str, str, float]], text: str) -> None:
    parts = [PathPart(kind, "", group, "all_gather", 0, 1, us) for kind, group, us in path]  # type: ignore[arg-type]
    groups = [
        GroupTime(name, 8, nodes, "all_gather", 1, 0, 0.0, 0.0, 0.0, exposed_us)
        for name, nodes, exposed_us in (("tp", 1, 20.0), ("dp", 4, 4.0))
    ]
    bounds = {"compute": 10.0, "memory": 30.0}
    found = replace(step(), step_us=100.0, critical_path=parts, by_group=groups, by_bound=bounds, gains=GAINS)
    assert limit_text(found) == text


KERNELS, HOST = StepLimit("kernels", "", 0, 77.0, 70.0, 85.0), StepLimit("host", "", 0, 9.0, 5.0, 60.0)
DP, TP = StepLimit("collectives", "dp", 4, 94.0, 66.0, 130.0), StepLimit("collectives", "tp", 1, 19.0, 16.0, 22.0)
PAIR = TimeGain("b200 and twice the NIC bandwidth", "--gpu b200 --what-if bandwidth=2x", 40.0, is_pair=True)


@pytest.mark.parametrize(
    ("limits", "more", "text"),
    [
        (
            [DP, KERNELS, TP, HOST],
            [PAIR],
            "limited by dp over the NICs or kernels (memory 75%); twice the NIC bandwidth: -6.8%; b200 and twice ...",
        ),
        # Outside of each other's intervals, the longest one is the limit.
        ([replace(DP, low_us=80.0), KERNELS], [], "limited by dp over the NICs; twice the NIC bandwidth: -6.8%"),
        ([KERNELS, TP], [], "limited by kernels (memory 75%); b200, fabric dgx-b200-ndr: -50.0%"),
        # Its own estimate lies in the other's interval.
        (
            [KERNELS, replace(HOST, high_us=80.0)],
            [],
            "limited by kernels (memory 75%) or the host; b200, fabric dgx-b200-ndr: -50.0%",
        ),
        # All groups stand for each of them.
        (
            [replace(DP, kind="nics", group=""), DP, KERNELS],
            [],
            "limited by all groups over the NICs or kernels (memory 75%); twice the NIC bandwidth: -6.8%",
        ),
    ],
)
def test_the_verdict_names_the_longest_limit_and_those_that_it_may_not_exceed(
    limits: list[StepLimit], more: list[TimeGain], text: str
) -> None:
    path = [PathPart("kernels", "", "", "", 1, 1, 77.0), PathPart("collectives", "", "dp", "all_gather", 0, 1, 23.0)]
    bounds = {"compute": 10.0, "memory": 30.0}
    found = replace(step(), step_us=100.0, critical_path=path, by_bound=bounds, gains=[*more, *GAINS], limits=limits)
    assert limit_text(found).replace("b200 and twice the NIC bandwidth: -60.0%", "b200 and twice ...") == text


def test_limits_are_side_by_side_in_one_line() -> None:
    assert limits_text(step()) == ""
    assert limits_text(replace(step(), limits=[DP, KERNELS, TP, HOST])) == (
        "on its own, each part would take: "
        "dp over the NICs 94.0 µs, kernels 77.0 µs, tp over the links of a node 19.0 µs, the host 9.0 µs"
    )


def test_a_change_that_rounds_to_nothing_has_no_sign() -> None:
    assert [relative_time(us, 100.0) for us in (93.2, 100.04, 99.96, 183.9)] == ["-6.8%", "0.0%", "0.0%", "+83.9%"]


@pytest.mark.parametrize(
    ("titles", "text"),
    [(["A"], "A"), (["A", "B, and C"], "A and B, and C"), (["A", "B, and C", "D"], "A; B, and C; and D")],
)
def test_three_changes_that_make_a_rank_fit_are_told_apart(titles: list[str], text: str) -> None:
    remedy = Remedy([], titles, 0, 1 << 30, 1 << 30, "fits", 0.0, None, [])
    assert remedy_text(replace(summary_of_nothing(), remedy=remedy)) == f"{text}: then needs 1.00 GiB: fits"


def test_steps_whose_inputs_differ_are_said_with_the_time_and_with_the_peak() -> None:
    sizes = {1: 9_000, 2: 512, 3: 4_096, 4: 2_560}
    steps = [StepPeak(step, 1, step << 30, 8 << 30, elements=size) for step, size in sizes.items()]
    summary = replace(summary_of_nothing(), steps=steps, peak_step=3)
    (inputs,) = sizes_figures(summary, None, 4)
    assert inputs.more == "elements; 512 to 4,096 in steps 2 to 4, median 2,560: the time is of this size alone"
    assert peak_size(summary) == ", with the largest inputs; 2.00 to 4.00 GiB in steps 2 to 4"
    other = peak_size(replace(summary, peak_step=4))
    assert other.startswith(", with inputs of 2,560 elements (the largest: 4,096); ")
    alike = replace(summary, steps=[replace(step, elements=4_096 + step.step) for step in steps])
    older = replace(summary, steps=[replace(step, elements=math.nan) for step in steps])
    assert [(sizes_figures(each, None, 4), peak_size(each)) for each in (alike, older)] == [([], "")] * 2
