"""Slots from which a step reads and to which it writes recurrent states, compared with a plain loop; also in graphs."""

import random

import torch
from tests.fakes.queued_device import RecordedQueue

from octavo.worker.request_rows import state_slots

BLOCK_TOKENS, NUM_ROWS, NUM_COLUMNS = 4, 5, 6
TABLE = (
    torch.randperm(100, generator=torch.Generator().manual_seed(1))[: NUM_ROWS * NUM_COLUMNS].int().view(NUM_ROWS, -1)
)


def slots_of_spans(spans: list[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
    """Return `slot_mapping` and `state_slots` of a step that computes positions start ... end - 1 of each row."""
    rows = torch.tensor([row for row, start, end in spans for _ in range(start, end)])
    positions = torch.tensor([position for _, start, end in spans for position in range(start, end)])
    starts = torch.tensor([0] + [end - start for _, start, end in spans], dtype=torch.int32).cumsum(0)
    found = state_slots(TABLE, BLOCK_TOKENS, rows, positions, starts)
    assert found.state_slots is not None
    return found.slot_mapping.tolist(), found.state_slots.tolist()


def test_states_are_stored_behind_full_blocks_and_last_tokens() -> None:
    choose = random.Random(7)
    for _ in range(50):
        spans = []
        for row in choose.sample(range(NUM_ROWS), choose.randint(1, NUM_ROWS)):
            start = choose.randrange(NUM_COLUMNS * BLOCK_TOKENS)
            spans.append((row, start, choose.randint(start + 1, NUM_COLUMNS * BLOCK_TOKENS)))
        stored = [
            int(TABLE[row, at // BLOCK_TOKENS]) if at == end - 1 or at % BLOCK_TOKENS == BLOCK_TOKENS - 1 else -1
            for row, start, end in spans
            for at in range(start, end)
        ]
        begun = [int(TABLE[row, (start - 1) // BLOCK_TOKENS]) if start else -1 for row, start, _ in spans]
        assert slots_of_spans(spans) == (stored, begun)


def test_a_graph_of_decoding_finds_them_anew() -> None:
    rows, positions, starts = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]), torch.arange(4, dtype=torch.int32)
    stored, begun = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)

    def step() -> None:
        found = state_slots(TABLE, BLOCK_TOKENS, rows, positions, starts)
        assert found.state_slots is not None
        stored.copy_(found.slot_mapping)
        begun.copy_(found.state_slots)

    replay = RecordedQueue().capture(step)
    rows.copy_(torch.tensor([4, 2, 3]))
    positions.copy_(torch.tensor([8, 7, 0]))
    replay()
    assert stored.tolist() == [int(TABLE[4, 2]), int(TABLE[2, 1]), int(TABLE[3, 0])]
    assert begun.tolist() == [int(TABLE[4, 1]), int(TABLE[2, 1]), -1]
