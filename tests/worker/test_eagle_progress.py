"""How far an EAGLE-3 head is in each row, and what it finds in cached blocks."""

import numpy as np
from tests.worker.test_draft_progress import BLOCK_SIZE, MAX_LEN, NUM_BLOCKS, ints, new, step

from octavo.contracts.schedule import Int32Array, SchedulerOutput
from octavo.worker.draft_progress import OWN_BLOCKS, BlockCopy, EagleProgress

NUM_ROWS = 4


def make() -> EagleProgress:
    return EagleProgress(NUM_ROWS, MAX_LEN // BLOCK_SIZE, NUM_BLOCKS, block_size=BLOCK_SIZE, group=0, max_len=MAX_LEN)


def apply(progress: EagleProgress, made: SchedulerOutput) -> None:
    """Apply a step; no prompts are computed with it."""
    followed = progress.apply(made, made.num_computed_tokens + made.num_scheduled_tokens)
    assert not len(followed)


def run(
    progress: EagleProgress, tokens: Int32Array, row: int, start: int, end: int
) -> tuple[list[int], list[BlockCopy]]:
    """Do what a step does that computes positions [start, end) of a row; return the rows to catch up, and copies."""
    rows, ends = ints(row), ints(end)
    progress.skip_gaps(rows, ints(start))
    due = progress.take_complete(rows, ends, tokens)
    copies = progress.check_hits(tokens)
    progress.num_computed[rows[due]] = ends[due]
    progress.num_available[rows] = ends
    return due.tolist(), copies


def table_of_tokens() -> Int32Array:
    return np.tile(np.arange(MAX_LEN + 1, dtype=np.int32), (NUM_ROWS, 1))


def test_a_hit_that_continues_alike_uses_the_blocks() -> None:
    progress, tokens = make(), table_of_tokens()
    apply(progress, step([("a", 0, 0, 10)], [new("a", 0, 10, [3, 4, 5])]))
    assert run(progress, tokens, 0, 0, 10) == ([0], [])
    apply(progress, step([("b", 1, 8, 3)], [new("b", 1, 11, [3, 4, 6], num_cached=8)]))
    assert run(progress, tokens, 1, 8, 11) == ([], [])
    assert progress.base[1] == 0
    assert progress.num_computed[1] == 8
    assert progress.can_draft(ints(1), ints(12)).all()


def test_a_hit_that_continues_in_another_way_has_a_copy_of_the_block() -> None:
    progress, tokens = make(), table_of_tokens()
    tokens[1, 8] = 77
    apply(progress, step([("a", 0, 0, 10)], [new("a", 0, 10, [3, 4, 5])]))
    run(progress, tokens, 0, 0, 10)
    apply(progress, step([("b", 1, 8, 3)], [new("b", 1, 11, [3, 4, 6], num_cached=8)]))
    own = NUM_BLOCKS + OWN_BLOCKS
    assert run(progress, tokens, 1, 8, 11) == ([], [BlockCopy(1, 4, own, 7)])
    assert progress.tables[1, :3].tolist() == [3, own, 6]
    assert progress.tables[0, :3].tolist() == [3, 4, 5]


def test_a_hit_on_blocks_that_a_step_computes_itself() -> None:
    progress, tokens = make(), table_of_tokens()
    both = [new("a", 0, 10, [3, 4, 5]), new("b", 1, 11, [3, 4, 6], num_cached=8)]
    apply(progress, step([("a", 0, 0, 10), ("b", 1, 8, 3)], both))
    assert progress.take_complete(ints(0, 1), ints(10, 11), tokens).tolist() == [0]
    assert progress.check_hits(tokens) == []
    assert progress.base[1] == 0


def test_a_hit_on_blocks_without_entries_is_a_miss() -> None:
    """The context begins behind them."""
    progress, tokens = make(), table_of_tokens()
    apply(progress, step([("b", 1, 8, 3)], [new("b", 1, 11, [3, 4, 6], num_cached=8)]))
    assert run(progress, tokens, 1, 8, 11) == ([], [])
    assert progress.base[1] == 8
    assert progress.tables[1, 0] == 6
    assert not progress.can_draft(ints(1), ints(9)).any()
    assert progress.can_draft(ints(1), ints(12)).all()


def test_states_that_a_failed_step_has_lost() -> None:
    progress, tokens = make(), table_of_tokens()
    apply(progress, step([("a", 0, 0, 5)], [new("a", 0, 15, [3, 4, 5, 6])]))
    run(progress, tokens, 0, 0, 5)
    apply(progress, step([("a", 0, 9, 2)]))
    progress.skip_gaps(ints(0), ints(9))
    assert progress.base[0] == progress.num_computed[0] == progress.num_available[0] == 12
    assert progress.tables[0, 0] == 6


def test_rejected_drafts_and_reused_blocks() -> None:
    progress, tokens = make(), table_of_tokens()
    apply(progress, step([("a", 0, 0, 10)], [new("a", 0, 10, [3, 4, 5])]))
    run(progress, tokens, 0, 0, 10)
    apply(progress, step([("a", 0, 9, 1)]))
    assert progress.num_computed[0] == 9
    apply(progress, step([("c", 2, 0, 4)], [new("c", 2, 4, [3])], ended=["a"]))
    apply(progress, step([("b", 1, 4, 3)], [new("b", 1, 7, [3, 6], num_cached=4)]))
    progress.check_hits(tokens)
    assert progress.base[1] == 4
