import os
import pickle
import struct
import zlib
from pathlib import Path

import pytest

from fakedist.errors import RunDirectoryError
from fakedist.rundir.journal import MAGIC, JournalReader, JournalWriter, read_journal
from fakedist.rundir.notes import Note
from fakedist.rundir.records import NoteRecord, OperationsRecord
from fakedist.rundir.tape import TAPE_RECORDS, StoredRecord

RECORDS = [NoteRecord(Note("first", "the first")), OperationsRecord(0, b"\x01\x00\x00\x00", bytes(4))]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    writer = JournalWriter(tmp_path / "journal.bin")
    for record in RECORDS:
        writer.append(record)
    writer.close()
    return tmp_path / "journal.bin"


def test_records_come_back_in_order(journal: Path) -> None:
    reader = read_journal(journal)
    assert list(reader) == RECORDS
    assert not reader.truncated


def test_a_record_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "journal.bin")
    writer.append(RECORDS[0])
    assert list(read_journal(tmp_path / "journal.bin")) == RECORDS[:1]
    writer.close()


def test_cut_off_anywhere_the_whole_records_before_the_cut_are_read(journal: Path) -> None:
    whole = journal.read_bytes()
    first_end = len(MAGIC) + 8 + struct.unpack_from("<I", whole, len(MAGIC))[0]
    for length in range(len(whole)):
        journal.write_bytes(whole[:length])
        reader = read_journal(journal)
        assert list(reader) == RECORDS[: int(length >= first_end)]
        assert reader.truncated == (length not in (len(MAGIC), first_end))


def test_what_is_written_during_the_reading_is_left_for_the_next(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "tape.bin")
    records = [StoredRecord("key", bytes([number]) * number) for number in range(1, 5)]
    writer.append(records[0])
    reading = read_journal(tmp_path / "tape.bin", TAPE_RECORDS)
    begun = iter(reading)
    assert next(begun) == records[0]
    for record in records[1:]:
        writer.append(record)
    assert list(begun) == []
    assert list(JournalReader(tmp_path / "tape.bin", TAPE_RECORDS, reading.position)) == records[1:]


def test_a_damaged_record_ends_the_reading(journal: Path) -> None:
    data = bytearray(journal.read_bytes())
    data[-1] ^= 0xFF
    journal.write_bytes(data)
    reader = read_journal(journal)
    assert list(reader) == RECORDS[:1]
    assert reader.truncated


def test_a_broken_record_before_whole_ones_is_damage(journal: Path) -> None:
    data = bytearray(journal.read_bytes())
    for at in range(len(MAGIC), len(MAGIC) + 12):  # its length, its checksum, its first words
        broken = data.copy()
        broken[at] ^= 0x55
        journal.write_bytes(broken)
        with pytest.raises(RunDirectoryError, match=r"the recording is damaged: \S+journal\.bin is broken at byte 4"):
            list(read_journal(journal))


def test_zeros_that_a_crashed_machine_leaves_at_the_end_are_a_cut(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes() + bytes(300))
    reader = read_journal(journal)
    assert list(reader) == RECORDS
    assert reader.truncated


def test_a_length_beyond_the_file_reads_no_more_than_the_file(journal: Path) -> None:
    journal.write_bytes(MAGIC + struct.pack("<II", 0xFFFFFFF0, 0) + b"x")
    reader = read_journal(journal)
    assert list(reader) == []
    assert reader.truncated


def test_a_pickle_that_wants_to_run_code_is_refused_by_name(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("never",)

    body = pickle.dumps(Hostile(), protocol=4)
    path = tmp_path / "journal.bin"
    path.write_bytes(MAGIC + struct.pack("<II", len(body), zlib.crc32(body)) + body)
    with pytest.raises(RunDirectoryError, match=r"builtins\.print"):
        list(read_journal(path))


@pytest.mark.parametrize(
    "body", [b"no pickle", pickle.dumps([1, 2], protocol=4), pickle.dumps({"what": 1}, protocol=4)]
)
def test_a_whole_record_that_fakedist_did_not_write_is_refused(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "journal.bin"
    path.write_bytes(MAGIC + struct.pack("<II", len(body), zlib.crc32(body)) + body)
    with pytest.raises(RunDirectoryError, match=r"journal\.bin is not a journal of fakedist"):
        list(read_journal(path))


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.bin").write_bytes(b"PAR1 something else")
    with pytest.raises(RunDirectoryError, match="not a journal"):
        list(read_journal(tmp_path / "journal.bin"))


def test_an_existing_journal_is_never_written_over(journal: Path) -> None:
    with pytest.raises(FileExistsError):
        JournalWriter(journal)


def test_a_hole_of_many_gigabytes_is_damage_and_is_not_read(journal: Path) -> None:
    os.truncate(journal, 64 << 30)
    with pytest.raises(RunDirectoryError, match=r"is broken at byte .*, and more records follow"):
        list(read_journal(journal))
