"""Whole runs from their journals, however they ended. Notes on the part of a script that was not recorded."""

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet
import pytest

from fakedist.analysis.recording import Recording
from fakedist.cost_model.estimated import recorded_models
from fakedist.errors import RunDirectoryError
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.options import Job
from fakedist.report.content.wording import run_facts
from fakedist.results import building, summing_up
from fakedist.results.building import build_tables, compute_tables
from fakedist.results.opening import open_run, open_run_directory
from fakedist.results.summing_up import coverage_notes
from fakedist.rundir.directory import JOURNAL_NAME, MAGIC, SNAPSHOT_NAME, create_run_directory, new_manifest
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.records import GpuRecord, OutcomeRecord, StepRecord, TrainingFacts
from fakedist.rundir.schema import ACTIONS
from fakedist.rundir.summary import OutOfMemory, Summary
from fakedist.rundir.table_rows import TABLES
from fakedist.units import UNLIMITED_BYTES
from tests.unit.analysis.recorded import GIB, GPU, KIB, MIB, HandMade, new_run, write_plain
from tests.unit.report.handmade import out_of_memory


def one_step() -> HandMade:
    made = HandMade()
    made.op("forward", 1, made.layer("head"))
    made.alloc(0, 4 * MIB)
    made.step(1)
    made.ended()
    return made


def built(directory: Path) -> dict[str, Any]:
    build_tables(directory)
    manifest = json.loads((directory / "run.json").read_text())
    assert isinstance(manifest, dict)
    return manifest


def texts(found: dict[str, Any]) -> list[str]:
    return [note["text"] for note in found["notes"]]


#: What is said of a run that was stopped.
NOT_REACHED = (
    "the script was stopped after {}; not recorded: validation, saving and what else follows "
    "(--until end records the whole script)"
)


def test_every_table_and_key_of_the_schema_is_there(tmp_path: Path) -> None:
    manifest = built(one_step().write(new_run(tmp_path)))
    assert sorted(path.stem for path in (tmp_path / "tables").iterdir()) == sorted(TABLES)
    for name, table in TABLES.items():
        schema = pyarrow.parquet.read_schema(tmp_path / "tables" / f"{name}.parquet")
        assert [(column.name, column.type) for column in table.columns] == [
            (field.name, str(field.type).replace("element", "item").replace("<item: ", "<")) for field in schema
        ]
    assert list(manifest["summary"]) == [field.name for field in dataclasses.fields(Summary)]
    assert (tmp_path / SNAPSHOT_NAME).exists()
    assert manifest["versions"] == {"python": "3.11.0", "torch": "2.15.0", "cuda": "13.2"}
    assert manifest["dropped"] == []
    summary = manifest["summary"]
    assert summary["peak_allocated_bytes"] == 4 * MIB
    assert sum(summary["by_category"].values()) == 4 * MIB
    assert sum(layer["peak_own_bytes"] for layer in summary["layers"]) == 4 * MIB
    assert texts(summary) == [NOT_REACHED.format("1 step")]
    assert summary["fits"] is True
    assert summary["exit"] == {"outcome": "stopped", "code": 0, "message": ""}


@pytest.mark.parametrize("journal", [b"", MAGIC, MAGIC[:2]])
def test_a_rank_that_wrote_nothing_still_has_its_tables(tmp_path: Path, journal: bytes) -> None:
    (new_run(tmp_path, "killed") / JOURNAL_NAME).write_bytes(journal)
    manifest = built(tmp_path)
    summary = manifest["summary"]
    assert summary["exit"]["outcome"] == "killed"
    assert (summary["peak_allocated_bytes"], summary["layers"], summary["by_phase"]) == (0, [], [])
    assert manifest["notes"][0]["code"] == "no_last_record"
    assert sorted(path.stem for path in (tmp_path / "tables").iterdir()) == sorted(TABLES)


def test_a_journal_cut_off_anywhere_gives_what_it_has(tmp_path: Path) -> None:
    whole = one_step().write(new_run(tmp_path / "whole")) / JOURNAL_NAME
    data = whole.read_bytes()
    for number, length in enumerate([*range(0, len(data), 613), len(data) - 1]):
        run = new_run(tmp_path / str(number), "killed")
        (run / JOURNAL_NAME).write_bytes(data[:length])
        manifest = built(run)
        assert manifest["summary"]["peak_allocated_bytes"] in (0, 4 * MIB)
    assert manifest["summary"]["peak_allocated_bytes"] == 4 * MIB
    cut = "the recording ends in the middle of a record, which is left out"
    assert cut in texts(manifest)
    assert manifest["dropped"][-1] == {"code": "recording_cut", "text": cut}


def test_records_of_an_unknown_kind_are_left_out_and_named(tmp_path: Path) -> None:
    run = one_step().write(new_run(tmp_path))
    write_plain(tmp_path / "other", {"kind": "surprise", "rows": [1, 2]})
    with (run / JOURNAL_NAME).open("ab") as journal:
        journal.write((tmp_path / "other").read_bytes()[len(MAGIC) :])
    manifest = built(run)
    assert manifest["summary"]["peak_allocated_bytes"] > 0
    text = "the recording has records that this fakedist does not know, which are left out: surprise"
    assert {"code": "records_unknown", "text": text} in manifest["dropped"]


@pytest.mark.parametrize(
    ("journal", "cause"),
    [
        (None, "is missing"),
        (b"PK\x03\x04 and more", "is not a journal of fakedist"),
        (MAGIC, "holds no record"),
        (b"", "holds no record"),
        ({"kind": "events"}, "has a record 'events' that is not fakedist's: it has no device"),
        (
            {"kind": "ops", "first": 0, "operation": b"123", "scope": b"1234"},
            "has a record 'ops' that is not fakedist's: operation is not a column",
        ),
    ],
)
def test_a_damaged_recording_is_refused_and_nothing_is_written(tmp_path: Path, journal: Any, cause: str) -> None:
    built(one_step().write(new_run(tmp_path)))
    manifest = json.loads((tmp_path / "run.json").read_text())
    del manifest["summary"]
    (tmp_path / "run.json").write_text(json.dumps(manifest))
    (tmp_path / JOURNAL_NAME).unlink()
    if isinstance(journal, bytes):
        (tmp_path / JOURNAL_NAME).write_bytes(journal)
    elif journal is not None:
        write_plain(tmp_path / JOURNAL_NAME, journal)
    before = contents(tmp_path)
    with pytest.raises(RunDirectoryError, match=rf"^the recording is damaged: \S+journal\.bin {cause}"):
        open_run(tmp_path)
    assert contents(tmp_path) == before


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_run_that_is_still_written_is_not_opened(tmp_path: Path) -> None:
    with create_run_directory(tmp_path / "run", False) as directory:
        new_manifest(directory, Job(world_size=8, rank=1, target="train.py"))
        with pytest.raises(RunDirectoryError, match="is still being written"):
            open_run_directory(directory)


def test_tables_are_never_written_through_a_link(tmp_path: Path) -> None:
    run = one_step().write(new_run(tmp_path / "run"))
    target = tmp_path / "target"
    target.mkdir()
    (run / "tables").symlink_to(target)
    before = contents(run)
    with pytest.raises(RunDirectoryError, match="tables is a symbolic link"):
        build_tables(run)
    assert list(target.iterdir()) == []
    assert contents(run) == before


def test_what_was_computed_before_the_end_is_used_unless_more_was_recorded(tmp_path: Path) -> None:
    run = one_step().write(new_run(tmp_path))
    computed = compute_tables(run)
    marked = dataclasses.replace(computed, tables={**computed.tables, "steps": computed.tables["steps"][:0]})
    build_tables(run, computed=marked)
    assert len(open_run(run).table("steps")) == 0
    with (run / JOURNAL_NAME).open("ab") as journal:
        journal.write(b"a record that a kill cut off")
    build_tables(run, computed=marked)
    assert len(open_run(run).table("steps")) == 1
    assert open_run(run).manifest.dropped


def test_tables_that_fail_to_be_made_leave_those_that_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(one_step().write(new_run(tmp_path)))
    (tmp_path / "tables" / "layers.parquet").write_bytes(b"as it was")
    before = contents(tmp_path)
    write = pyarrow.parquet.write_table

    def disk_full(table: Any, path: Any, **options: Any) -> None:
        if "allocated_bytes" in table.column_names:  # the table events
            raise OSError(errno.ENOSPC, "No space left on device")
        write(table, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pyarrow.parquet, "write_table", disk_full)
        with pytest.raises(OSError, match="No space"):
            build_tables(tmp_path)
    assert contents(tmp_path) == before
    build_tables(tmp_path)
    assert contents(tmp_path)[str(tmp_path / "tables" / "layers.parquet")] != b"as it was"
    assert not list(tmp_path.glob(".tables-*"))


def test_a_request_that_failed_counts_unless_the_script_handled_it(tmp_path: Path) -> None:
    handled = one_step()
    handled.record("oom", device=0, requested_bytes=6 * GIB, op=-1, layer="", line="", message="")
    found = built(handled.write(new_run(tmp_path / "handled")))
    assert found["summary"]["out_of_memory"] is None
    assert found["summary"]["fits"] is True
    assert [text for text in texts(found) if "too little once for 6.00 GiB, and the script handled the error" in text]


@pytest.mark.parametrize(("segment", "fits"), [(78 * GIB, True), (79 * GIB + 512, False)])
def test_with_unlimited_memory_the_peak_is_held_against_the_models_own(
    tmp_path: Path, segment: int, fits: bool
) -> None:
    made = one_step()
    made.gpu = dataclasses.replace(GPU, capacity_bytes=UNLIMITED_BYTES, spec_memory_bytes=80 * GIB)
    made.event("segment_alloc", 2 * GIB, segment)
    summary = built(made.write(new_run(tmp_path, gpu_memory_bytes=UNLIMITED_BYTES)))["summary"]
    assert summary["capacity_bytes"] == 80 * GIB
    assert summary["fits"] is fits


@pytest.mark.parametrize(
    ("seen", "recorded", "expected"),
    [
        ("exit", ("exception", 1, "ValueError: no"), ("exception", 0, "ValueError: no")),
        ("timeout", ("interrupted", 130, ""), ("timeout", 0, "")),
        ("killed", (), ("killed", 0, "")),
        ("running", (), ("killed", 0, "with fakedist profile, which was killed")),
    ],
)
def test_the_rank_knows_better_than_its_exit_code_but_not_than_a_kill(
    tmp_path: Path, seen: str, recorded: tuple[Any, ...], expected: tuple[str, int, str]
) -> None:
    made = HandMade()
    if recorded:
        made.ended(*recorded)
    run = open_run(made.write(new_run(tmp_path, seen)))
    ending = run.summary.exit
    assert (ending.outcome, ending.code) == expected[:2]
    assert expected[2] in dict(run_facts(run))["ended"]


@pytest.mark.parametrize(
    ("own_bytes", "peak_bytes", "said"),
    [
        (4 * MIB, 4 * MIB, "the rank also used cuda:0; the tables are about cuda:1"),
        (0, 16 * MIB, "the rank used cuda:0, not the device of its LOCAL_RANK"),
    ],
)
def test_the_tables_are_about_the_ranks_own_device_if_it_used_it(
    tmp_path: Path, own_bytes: int, peak_bytes: int, said: str
) -> None:
    made = HandMade()
    made.gpu = dataclasses.replace(GPU, device_index=1)
    made.op()
    made.alloc(0, 16 * MIB, device=0)
    if own_bytes:
        made.alloc(0, own_bytes, device=1)
    made.ended()
    manifest = built(made.write(new_run(tmp_path)))
    assert manifest["summary"]["peak_allocated_bytes"] == peak_bytes
    assert texts(manifest) == [said, NOT_REACHED.format("0 steps")]


def test_the_request_that_did_not_fit_is_told_with_what_was_held_then(tmp_path: Path) -> None:
    found = open_run(out_of_memory(tmp_path / "run")).summary
    assert found.fits is False
    assert found.out_of_memory == OutOfMemory(
        requested_bytes=90 * GIB, layer="layers.2.mlp", operation="aten.addmm.default",
        line="/job/model.py:12 (forward)", allocated_bytes=144 * MIB, reserved_bytes=GIB, step=3, phase="forward",
        limit_bytes=80 * GIB,
    )  # fmt: skip


def test_a_device_on_which_only_a_snapshot_was_taken_was_not_used(tmp_path: Path) -> None:
    made = HandMade()
    made.op()
    made.alloc(0, MIB, device=1)
    made.events[0] = [(ACTIONS.index("snapshot"), 0, 0, 0, 0, -1, -1)]  # torch.cuda.memory_snapshot() leaves one on all
    recording = made.read(tmp_path)
    assert (recording.device, sorted(recording.events)) == (1, [1])


def test_a_run_without_a_forward_says_why_everything_is_other(tmp_path: Path) -> None:
    made = HandMade()
    made.op("init", 0)
    made.alloc(0, 8 * MIB)
    (note,) = [text for text in texts(built(made.write(new_run(tmp_path / "died")))) if "no forward ran" in text]
    assert note.endswith("counts as other, outside of modules")
    made.op("forward", 1)
    assert not [text for text in texts(built(made.write(new_run(tmp_path / "went")))) if "no forward ran" in text]


def test_notes_say_what_a_reader_must_know(tmp_path: Path) -> None:
    made = one_step()
    made.record("note", note={"code": "mine", "text": "a word of the rank"})
    made.record("invented", rows=[("aten.item", "/job/train.py", 3, 2, 2), ("aten.item", "/job/train.py", 3, 1, 5)])
    made.record("invented", rows=[("aten.topk.default", "/job/router.py", 8, 1, 4)])
    made.record("unanswered", rows=[("cudaGraphLaunch", 3)])
    made.stats(MIB, GIB)
    notes = texts(built(made.write(new_run(tmp_path, collectives="noop"))))
    assert notes[0] == "a word of the rank"
    first_words = ["the", "11", "aten.topk.default,", "cudaGraphLaunch", "collectives", "the"]
    assert [note.split(" ")[0] for note in notes[1:]] == first_words
    assert "first at /job/train.py:3," in notes[2]
    assert "first at /job/router.py:8," in notes[3]
    invented = pyarrow.parquet.read_table(tmp_path / "tables" / "invented.parquet").to_pylist()
    assert invented[0] == {"operation": "aten.item", "line": "/job/train.py:3", "num_calls": 3, "num_values": 7}
    assert [row["num_values"] for row in invented] == [7, 4]


def test_the_window_of_a_layers_most_is_the_last_step_that_ended(tmp_path: Path) -> None:
    made = HandMade()
    layer = made.layer("head")
    for step, size in ((1, 64), (2, 8), (3, 32)):
        made.op("forward", step, layer)
        made.alloc(0, size * KIB)
        made.free(0, size * KIB)
    made.step(1)
    made.step(2)
    layers = built(made.write(new_run(tmp_path)))["summary"]["layers"]
    assert [(row["name"], row["most_total_bytes"]) for row in layers] == [("head", 8 * KIB)]


@pytest.mark.parametrize("is_read", [True, False])
def test_a_rank_that_trained_nothing_is_told_what_it_read_that_no_rank_sent(tmp_path: Path, is_read: bool) -> None:
    made = HandMade()
    made.op("other", 0)
    for line, read in (("train.py:3 (main)", False), ("train.py:9 (main)", is_read)):
        made.record("not_sent", line=line, call="broadcast", source=0, command="fakedist ...", is_read=read)
    made.record("outcome", outcome="finished", code=0, message="", last_phase="init", last_step=0)
    run = made.write(new_run(tmp_path, "finished"))
    told, note = texts(built(run))
    assert told.startswith("no training step: no module ran and no optimizer stepped")
    assert "broadcast from rank 0 at train.py:3 (main), broadcast from rank 0 at train.py:9 (main)" in note
    assert note.endswith("may be why it trained nothing. To receive them: fakedist ...")
    left = open_run_directory(run).summary.left_during_init
    assert left is not None
    assert left.not_sent == f"broadcast from rank 0 at train.py:{9 if is_read else 3} (main)"
    trained = HandMade()
    trained.op("forward", 1)
    trained.step(1)
    trained.record("not_sent", line="train.py:9 (main)", call="recv", source=-1, command="", is_read=is_read)
    trained.ended()
    notes = [text for text in texts(built(trained.write(new_run(tmp_path / "trained")))) if "should have sent" in text]
    assert len(notes) == is_read  # in training only what the script reads matters
    assert all("recv from any rank at train.py:9 (main)" in text and "To receive" not in text for text in notes)


def test_a_job_whose_calibration_table_is_gone_is_estimated_without_it_and_has_a_note(tmp_path: Path) -> None:
    gpu = find_gpu("h200")
    job = Job(world_size=1, rank=0, target="train.py", gpu="h200", times=str(tmp_path / "gone.json"))
    recording = Recording(gpu=GpuRecord(gpu_name=gpu.product, model=gpu))
    launches = pd.DataFrame({"call": [-1]})
    models, notes = recorded_models(recording, launches, job)
    assert models is not None
    assert models.prices.calibrated_on is None
    assert [note.code for note in notes] == ["calibration_table_not_used"]
    assert "gone.json cannot be read" in notes[0].text
    assert recorded_models(recording, launches, dataclasses.replace(job, times=None))[1] == []


def test_an_estimate_that_fails_is_a_note_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> object:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.delenv("FAKEDIST_TRACEBACK", raising=False)
    for module, name in ((building, "recorded_models"), (summing_up, "estimate_outside"), (summing_up, "find_advice")):
        monkeypatch.setattr(module, name, broken)
    manifest = built(one_step().write(new_run(tmp_path)))
    failed = [note["text"] for note in manifest["notes"] if note["code"] == "estimate_failed"]
    assert [text.partition(" could not be")[0] for text in failed] == [
        "the step's time",
        "memory outside the caching allocator",
        "what would help",
    ]
    assert all("ZeroDivisionError: float division by zero in fakedist/results/" in text for text in failed)
    assert manifest["summary"]["notes"] == manifest["notes"]
    assert manifest["summary"]["peak_allocated_bytes"] == 4 * MIB
    assert run_facts(open_run(tmp_path))


def test_a_run_whose_tables_were_never_written_is_opened_and_nothing_is_written(tmp_path: Path) -> None:
    """Its directory may be read-only, or on a machine that only reads."""
    run = one_step().write(new_run(tmp_path, "running"))
    before = {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))}
    opened = open_run_directory(run)
    assert opened.peak_allocated_bytes == 4 * MIB
    assert opened.summary.exit.outcome == "stopped"
    assert set(TABLES) >= {name for name in TABLES if opened.has(name)} >= {"blocks", "layers", "events"}
    assert {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))} == before


def notes(outcome: Outcome, num_steps: int = 2, until: Any = None, training: TrainingFacts | None = None) -> list[str]:
    steps = [StepRecord(step, 0, 0) for step in range(1, num_steps + 1)]
    recording = Recording(steps=steps, outcome=OutcomeRecord(outcome, 0, training=training))
    return [note.text for note in coverage_notes(recording, outcome, until)]


@pytest.mark.parametrize(
    ("until", "evaluated", "said"),
    [
        (None, False, "after 2 steps; not recorded: validation, saving and what else follows ("),
        (None, True, "after 2 steps; not recorded: saving and what else follows ("),
        ("validation", True, "after its first validation, with 2 steps recorded; not recorded: saving and what else"),
        ("save", True, "after its first checkpoint, with 2 steps recorded; not recorded: what follows ("),
    ],
)
def test_a_script_that_was_stopped_has_not_reached_what_follows(until: Any, evaluated: bool, said: str) -> None:
    (note,) = notes(Outcome.STOPPED, until=until, training=TrainingFacts(evaluated, 2, counts_itself=False))
    assert note.startswith(f"the script was stopped {said}")
    assert note.endswith("(--until end records the whole script)")


def test_a_script_without_an_optimizer_is_told_how_to_count_steps() -> None:
    (note,) = notes(Outcome.FINISHED, 0, training=TrainingFacts(False, 0, counts_itself=False))
    assert note.startswith("no training step: no optimizer stepped")
    assert "fakedist.step() at the end of each iteration" in note


@pytest.mark.parametrize(
    "training",
    [TrainingFacts(evaluated=False, optimizer_steps=3, counts_itself=False), TrainingFacts(False, 0, True), None],
)
def test_nothing_is_said_of_a_script_that_trained_to_its_end(training: TrainingFacts | None) -> None:
    assert notes(Outcome.FINISHED, training=training) == []
