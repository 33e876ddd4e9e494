"""The ring: every reader gets every message, in order and whole, whoever is slow."""

import random
import select
import threading
import time

import pytest

from octavo.distributed.shm_broadcast import NUM_SLOTS, SLOT_BYTES, RingReader, RingWriter


def wait(fd: int) -> None:
    select.select([fd], [], [])


@pytest.mark.parametrize("num_readers", [1, 3])
def test_messages_of_all_sizes(num_readers: int) -> None:
    generator = random.Random(7)
    edges = [1, SLOT_BYTES - 9, SLOT_BYTES - 8, SLOT_BYTES - 7, 2 * SLOT_BYTES - 16, NUM_SLOTS * SLOT_BYTES + 5]
    messages = [generator.randbytes(size) for size in [*edges, *(generator.randrange(1, 5000) for _ in range(60))]]
    ring = RingWriter(num_readers)
    read: list[list[bytes]] = [[] for _ in range(num_readers)]

    def follow(number: int) -> None:
        reader = RingReader(ring.ends[number])
        for turn in range(len(messages)):
            read[number].append(reader.read())
            if number == 1 and turn % 10 == 0:
                time.sleep(0.01)  # this one is slow

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(num_readers)]
    for thread in threads:
        thread.start()
    for message in messages:
        ring.write(message, wait)
    for thread in threads:
        thread.join()
    assert read == [messages] * num_readers
    ring.close()


def test_a_writer_waits_for_the_slowest() -> None:
    ring = RingWriter(2)
    readers = [RingReader(end) for end in ring.ends]
    waited: list[int] = []

    def read_all_of_one(fd: int) -> None:
        waited.append(fd)
        for _ in range(NUM_SLOTS):
            readers[1].read()

    for number in range(NUM_SLOTS):
        ring.write(bytes([number]), wait)
    for number in range(NUM_SLOTS):
        assert readers[0].read() == bytes([number])
    ring.write(b"one more", read_all_of_one)
    assert waited == [ring.ends[1].free_fd]
    assert [reader.read() for reader in readers] == [b"one more"] * 2
    ring.close()
