from __future__ import annotations

import os
import socket

from fakedist.rank.template.channel import Channel, Fork, Over


def test_messages_arrive_whole_with_their_files() -> None:
    ours, theirs = map(Channel, socket.socketpair())
    reader, writer = os.pipe()
    asked = Fork("/run", {"LARGE": "x" * 30_000, "BYTES": "\udcff"}, "/", 7)
    ours.send(asked, (writer,))
    message, (file,) = theirs.receive()
    assert message == asked
    os.write(file, b"through")
    assert os.read(reader, 100) == b"through"
    assert not ours.has_message()
    theirs.send(Over(-9))
    assert ours.has_message()
    assert ours.receive() == (Over(-9), [])
    theirs.close()
    assert ours.receive() == (None, [])
    ours.close()
    for each in (reader, writer, file):
        os.close(each)
