"""How far the draft model is in each row: behind, ahead by rejected drafts, and in cached blocks."""

from collections.abc import Sequence

import numpy as np

from octavo.contracts.schedule import CachedRequestData, Int32Array, NewRequestData, SchedulerOutput
from octavo.sampling_params import SamplingParams
from octavo.worker.draft_progress import DraftProgress

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 4, 12, 40


def ints(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def new(
    name: str, row: int, num_tokens: int, block_ids: list[int], *, num_cached: int = 0, speculative: bool = True
) -> NewRequestData:
    return NewRequestData(
        request_id=name,
        row=row,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        num_prompt_tokens=num_tokens,
        sampling_params=SamplingParams(seed=1, speculative=speculative),
        eos_token_ids=[],
        bad_words_token_ids=[],
        block_ids=[block_ids],
        num_computed_tokens=num_cached,
    )


def step(
    rows: Sequence[tuple[str, int, int, int]] = (),
    added: Sequence[NewRequestData] = (),
    ended: Sequence[str] = (),
    changed: CachedRequestData | None = None,
) -> SchedulerOutput:
    """Return a step of rows: name, row, start, count."""
    _, at, starts, counts = zip(*rows, strict=True) if rows else ((), (), (), ())
    return SchedulerOutput(
        step=1,
        req_ids=tuple(name for name, *_ in rows),
        rows=ints(*at),
        num_computed_tokens=ints(*starts),
        num_scheduled_tokens=ints(*counts),
        samples=np.ones(len(rows), dtype=np.bool_),
        total_num_scheduled_tokens=sum(counts),
        scheduled_new_reqs=list(added),
        scheduled_cached_reqs=changed or CachedRequestData(),
        finished_req_ids=list(ended),
    )


def make() -> DraftProgress:
    return DraftProgress(4, MAX_LEN // BLOCK_SIZE, NUM_BLOCKS, block_size=BLOCK_SIZE, group=0, max_len=MAX_LEN)


def apply(progress: DraftProgress, made: SchedulerOutput, num_drafts: int = 0) -> list[int]:
    """Apply a step, and compute the prompts in it; return which ones."""
    num_known = made.num_computed_tokens + made.num_scheduled_tokens - num_drafts
    followed = progress.apply(made, num_known)
    progress.num_computed[made.rows[followed]] = num_known[followed]
    indices: list[int] = followed.tolist()
    return indices


def test_rejected_drafts_are_computed_again() -> None:
    progress = make()
    assert apply(progress, step([("a", 0, 0, 9)], [new("a", 0, 9, [0, 1, 2])])) == [0]
    assert apply(progress, step([("a", 0, 9, 4)]), num_drafts=3) == []
    assert progress.num_computed[0] == 9
    progress.num_computed[0] = 12  # as far as it has drafted
    apply(progress, step([("a", 0, 11, 1)]))  # one draft was right: position 10
    assert progress.num_computed[0] == 11


def test_prefix_hits_begin_where_the_draft_model_was() -> None:
    progress = make()
    apply(progress, step([("a", 0, 0, 9)], [new("a", 0, 9, [0, 1, 2])]))
    for start in range(9, 17):  # without drafts
        blocks = CachedRequestData(rows=ints(0), block_ids=ints(start // 4), groups=ints(0), columns=ints(start // 4))
        apply(progress, step([("a", 0, start, 1)], changed=blocks if start % 4 == 0 else None))
    apply(progress, step(ended=["a"]))
    apply(progress, step([("b", 1, 16, 2)], [new("b", 1, 18, [0, 1, 2, 3, 7], num_cached=16)]))
    assert progress.num_computed[1] == 18
    apply(progress, step([("c", 2, 16, 1)], [new("c", 2, 17, [0, 1, 2, 3, 8], num_cached=16)], ended=["b"]))
    assert progress.num_computed[2] == 16  # b has computed what a had not
    apply(progress, step([("d", 3, 0, 8)], [new("d", 3, 8, [1, 2], speculative=False)], ended=["c"]))
    apply(progress, step([("e", 0, 16, 1)], [new("e", 0, 17, [0, 1, 2, 3, 8], num_cached=16)]))
    assert progress.num_computed[0] == 4  # d took block 1, and declines drafts


def test_siblings_that_arrive_together_share_what_the_first_computes() -> None:
    progress = make()
    siblings = [new("a", 0, 9, [0, 1, 2]), new("b", 1, 9, [0, 1, 3], num_cached=8)]
    assert apply(progress, step([("a", 0, 0, 9), ("b", 1, 8, 1)], siblings)) == [0]
    assert progress.num_computed[:2].tolist() == [9, 8]


def test_blocks_freed_behind_a_window_keep_what_was_computed() -> None:
    progress = make()
    null = NUM_BLOCKS
    apply(progress, step([("a", 0, 0, 9)], [new("a", 0, 9, [0, 1, 2])]))
    progress.num_computed[0] = 6
    freed = CachedRequestData(rows=ints(0, 0), block_ids=ints(null, null), groups=ints(0, 0), columns=ints(0, 1))
    apply(progress, step([("a", 0, 9, 1)], changed=freed))
    apply(progress, step([("b", 1, 8, 1)], [new("b", 1, 9, [null, 0, 3], num_cached=8)]))
    assert progress.num_computed[1] == 8
    apply(progress, step([("c", 2, 8, 1)], [new("c", 2, 9, [null, 1, 4], num_cached=8)]))
    assert progress.num_computed[2] == 4
