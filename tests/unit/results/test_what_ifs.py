"""A recorded step with a change of its communication, from the command line and in Python."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakedist.cli import main
from fakedist.errors import JobError
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.results.building import build_tables
from fakedist.results.opening import open_run
from tests.unit.analysis.recorded import GPU, new_run
from tests.unit.cost_model.launches_by_hand import ALL_REDUCE, PRODUCT, launch, record
from tests.unit.report.handmade import recorded, talking

#: A reduction of the gradients on stream 7 next to two gathers on stream 9, after and before a product.
STEP = [
    launch(PRODUCT, layer=4),
    launch(what="stream_records", event=1),
    launch(what="stream_waits", event=1, stream=7),
    launch(ALL_REDUCE, stream=7, call=0),
    launch(ALL_REDUCE, stream=9, call=1),
    launch(ALL_REDUCE, stream=9, call=2),
    launch(what="stream_records", event=2, stream=9),
    launch(what="stream_waits", event=2),
    launch(PRODUCT, layer=4),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = talking(recorded())
    made.gpu = replace(GPU, model=find_gpu("h100-80g"))
    made.others.append(record(STEP))
    environment = {"NCCL_ALGO": "Ring", "NCCL_BUFFSIZE": "1024"}
    made.record("nccl", version="2.29.2", environment=environment)
    directory = made.write(new_run(tmp_path_factory.mktemp("what_ifs") / "run"))
    build_tables(directory)
    return directory


def priced(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["time", str(run), "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_each_what_if_is_told_on_its_own_with_where_it_comes_from(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = priced(run, capsys, "--what-if", "merge=default_pg,tp", "--what-if", "bandwidth=nvlink:2x")
    merged, faster = found["what_ifs"]
    assert merged["what_if"] == "merge=default_pg,tp"
    assert merged["step_us"] == pytest.approx(found["time"]["step_us"] + merged["change_us"])
    assert merged["change_us"] > 0 > faster["change_us"]
    assert {row["group"] for row in merged["groups"]} == {"default_pg", "tp"}
    alone = priced(run, capsys, "--what-if", "bandwidth=nvlink:2x")["what_ifs"][0]
    assert alone == faster


def test_text_and_markdown_tell_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ((), ("--format", "markdown")):
        assert main(["time", str(run), "--what-if", "no-overlap", *options]) == 0
        told = capsys.readouterr().out
        assert "What if, estimated, each on its own" in told
        assert "Exposed communication with no-overlap" in told
        assert "the step as it is: " in told


def test_the_runs_own_variables_of_nccl_count_and_can_be_replaced(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def notes(*options: str) -> dict[str, str]:
        return {note["code"]: note["text"] for note in priced(run, capsys, *options)["kernels"]["notes"]}

    assert notes()["nccl_environment"] == "the times of collectives follow NCCL_ALGO=Ring"
    told = notes("--nccl-env", "NCCL_ALGO=Tree", "--nccl-env", "NCCL_MAX_NCHANNELS=4")["nccl_environment"]
    assert told == "the times of collectives follow NCCL_ALGO=Tree, NCCL_MAX_NCHANNELS=4"
    assert open_run(run).summary.kernels == open_run(run).priced_for().summary.kernels


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--what-if", "merge=tp"], "there is no what-if 'merge=tp'"),
        (["--what-if", "merge=tp,dp"], "no collectives on a group 'dp'"),
        (["--what-if", "no-overlap", "--format", "csv"], "--what-if is not for --format csv"),
        (["--nccl-env", "NCCL_ALGO"], "--nccl-env is KEY=VALUE"),
        (["--nccl-env", "NCCL_DEBUG=INFO"], "NCCL_DEBUG does not change"),
        (
            ["--router-load", "hot"],
            "is even, zipf:S, lognormal:SIGMA, W0 to W7 or a file of counts (.jsonl), not 'hot'",
        ),
    ],
)
def test_a_wrong_option_is_a_usage_error(
    run: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["time", str(run), *options]) == 2
    assert message in capsys.readouterr().err


def test_python_has_the_same_door(run: Path) -> None:
    opened = open_run(run)
    steps = [opened.priced_for(what_if=each).summary.time for each in (None, "no-overlap")]
    assert steps[0] is not None
    assert steps[1] is not None
    assert steps[1].step_us > steps[0].step_us
    with pytest.raises(JobError, match="there is no what-if"):
        opened.priced_for(what_if="more money")
