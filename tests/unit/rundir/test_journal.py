import os
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from fakedist.errors import RunDirectoryError
from fakedist.rundir.directory import MAGIC, JournalReader, JournalWriter, read_journal
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


@pytest.mark.parametrize(
    ("change", "num_read"),
    [
        (lambda data: data, 2),
        (lambda data: data[:-1] + bytes([data[-1] ^ 0xFF]), 1),
        (lambda data: data + bytes(300), 2),  # zeros that a crashed machine leaves
        (lambda data: MAGIC + struct.pack("<II", 0xFFFFFFF0, 0) + b"x", 0),  # a length beyond the file
    ],
    ids=["whole", "damaged", "zeros", "length"],
)
def test_the_reading_ends_where_the_end_is_cut_or_damaged(
    journal: Path, change: Callable[[bytes], bytes], num_read: int
) -> None:
    before = journal.read_bytes()
    journal.write_bytes(change(before))
    reader = read_journal(journal)
    assert list(reader) == RECORDS[:num_read]
    assert reader.truncated == (journal.read_bytes() != before)


def test_a_broken_record_before_whole_ones_is_damage(journal: Path) -> None:
    data = bytearray(journal.read_bytes())
    for at in range(len(MAGIC), len(MAGIC) + 12):  # its length, its checksum, its first words
        broken = data.copy()
        broken[at] ^= 0x55
        journal.write_bytes(broken)
        with pytest.raises(RunDirectoryError, match=r"the recording is damaged: \S+journal\.bin is broken at byte 4"):
            list(read_journal(journal))


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("never",)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (pickle.dumps(Hostile(), protocol=4), r"builtins\.print"),
        (b"no pickle", r"journal\.bin is not a journal of fakedist"),
        (pickle.dumps([1, 2], protocol=4), r"journal\.bin is not a journal of fakedist"),
        (pickle.dumps({"what": 1}, protocol=4), r"journal\.bin is not a journal of fakedist"),
        (None, "not a journal"),
    ],
)
def test_what_fakedist_did_not_write_is_refused(tmp_path: Path, body: bytes | None, message: str) -> None:
    record = b"PAR1 something else" if body is None else MAGIC + struct.pack("<II", len(body), zlib.crc32(body)) + body
    (tmp_path / "journal.bin").write_bytes(record)
    with pytest.raises(RunDirectoryError, match=message):
        list(read_journal(tmp_path / "journal.bin"))


def test_an_existing_journal_is_never_written_over(journal: Path) -> None:
    with pytest.raises(FileExistsError):
        JournalWriter(journal)


def test_a_hole_of_many_gigabytes_is_damage_and_is_not_read(journal: Path) -> None:
    os.truncate(journal, 64 << 30)
    with pytest.raises(RunDirectoryError, match=r"is broken at byte .*, and more records follow"):
        list(read_journal(journal))
