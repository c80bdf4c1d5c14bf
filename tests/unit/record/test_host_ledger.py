"""Records of the host's memory."""

from __future__ import annotations

from typing import cast

from fakedist.record.host_ledger import HostLedger
from fakedist.record.numbering import FastPath
from fakedist.record.position import Position
from fakedist.rundir.encoding import Record
from fakedist.rundir.memory_records import HostLookRecord, HostPlacesRecord


class Reader:
    """Compiled code that sees nothing."""

    def watch_host(self, on: bool) -> bool:
        return True

    def host_moved(self, place: int) -> None:
        assert place >= 0

    def malloc_bytes(self) -> int:
        return 0


def test_a_run_that_is_killed_after_a_look_knows_where_it_was() -> None:
    records: list[Record] = []
    ledger = HostLedger(records.append, Position(), cast(FastPath, Reader()), lambda record: None)
    with ledger.watching():
        ledger.look()
    known = 0
    for record in records:
        known += len(record.rows) if isinstance(record, HostPlacesRecord) else 0
        assert not isinstance(record, HostLookRecord) or record.place < known
    assert known == 1
    assert any(isinstance(record, HostLookRecord) for record in records)
