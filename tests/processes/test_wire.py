"""Promises:
- A message of any size arrives whole, with its descriptors. One that finds no room is not sent.
- A receiver without room for descriptors gets the message without them, or an error that says how to have more.
"""

from __future__ import annotations

import os
import tempfile

import pytest

from fastload.processes.wire import Wire, pair
from tests.conftest import open_descriptors
from tests.fakes import no_descriptors


def test_messages_arrive_whole_or_not_at_all() -> None:
    ours, theirs = pair()
    with ours, theirs, tempfile.TemporaryFile() as file:
        file.write(b"x")
        file.flush()
        before = open_descriptors()
        here, there = Wire(ours), Wire(theirs)
        assert here.receive(waits=False) is None
        for message in (b"", b"a" * 100, b"b" * 10**6):
            assert there.send(message, [file.fileno()], waits=False)
            received = here.receive()
            assert received is not None
            assert bytes(received[0]) == message
            (descriptor,) = received[1]
            assert os.pread(descriptor, 1, 0) == b"x"
            os.close(descriptor)
        sent = 0
        while there.send(bytes([sent % 256]) * 30_000, waits=False):
            sent += 1
        assert sent > 2
        for k in range(sent):
            received = here.receive()
            assert received is not None
            assert bytes(received[0]) == bytes([k % 256]) * 30_000
        del received
        assert here.receive(waits=False) is None
        theirs.close()
        with pytest.raises(EOFError):
            here.receive()
        assert len(open_descriptors()) == len(before) - 1


def test_a_message_comes_without_the_descriptors_for_which_there_is_no_room() -> None:
    ours, theirs = pair()
    with ours, theirs, tempfile.TemporaryFile() as file:
        before = open_descriptors()
        for message in (b"m", b"m" * 10**5):
            Wire(theirs).send(message, [file.fileno()] * 3)
            with no_descriptors():
                if len(message) == 1:
                    received = Wire(ours).receive()
                    assert received is not None
                    assert (bytes(received[0]), received[1]) == (b"m", [])
                else:
                    with pytest.raises(OSError, match="ulimit -n"):
                        Wire(ours).receive()
        assert open_descriptors() == before
