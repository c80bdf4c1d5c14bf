"""A recording's fields say what it keeps of a journal."""

from array import array

from fakedist.analysis.recording import JournalReading
from fakedist.rundir.launch_records import LaunchKeysRecord
from fakedist.rundir.memory_records import MarksRecord, SaveRecord
from fakedist.rundir.records import GpuRecord, ScopesRecord, StepRecord
from fakedist.rundir.rows import ScopeRow


def column(code: str, *values: int) -> bytes:
    return array(code, values).tobytes()


def test_a_recording_keeps_the_last_record_or_all_or_their_rows_or_their_columns() -> None:
    reading = JournalReading()
    scopes = [ScopeRow(number, 1, "forward", 0, recompute=False) for number in range(3)]
    save = SaveRecord("torch.save", "train.py:3 (main)", 0, 1, 2, written_bytes=10, asynchronous=False)
    for record in (
        GpuRecord("first"),
        StepRecord(1, 0, 10),
        ScopesRecord(scopes[:2]),
        MarksRecord(*(column(code, 1) for code in "qQBiqq")),
        GpuRecord("last"),
        save,
        StepRecord(2, 10, 20),
        ScopesRecord(scopes[2:]),
        MarksRecord(*(column(code, 2, 3) for code in "qQBiqq")),
    ):
        reading.take(record)
    reading.join()
    recording = reading.recording
    assert recording.gpu == GpuRecord("last")
    assert [step.step for step in recording.steps] == [1, 2]
    assert recording.saves == [save]
    assert recording.scopes == scopes
    assert list(recording.marks) == ["op", "address", "category", "layer", "start", "size"]
    assert all(values.tolist() == [1, 2, 3] for values in recording.marks.values())


def test_the_keys_of_launches_that_earlier_versions_wrote_are_passed_over() -> None:
    JournalReading().take(LaunchKeysRecord(1, column("Q", 7)))
