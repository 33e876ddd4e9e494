"""Shares: everything is held, by nearly equal parts, and query heads stand beside the kv head that they read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed.groups import HeadShare, Share


@given(total=st.integers(1, 5000), size=st.integers(1, 9))
def test_features_are_divided_without_gap_or_overlap(total: int, size: int) -> None:
    shares = [Share.of_features(total, rank, size) for rank in range(size)]
    assert [position for share in shares for position in range(share.start, share.stop)] == list(range(total))
    assert max(share.size for share in shares) <= max(1, -(-total // size)) * 1.125 + 1


@pytest.mark.parametrize(
    ("total", "size", "unit"), [(3072, 2, 128), (3072, 4, 128), (9728, 4, 128), (1100, 4, 32), (151936, 4, 128)]
)
def test_features_of_real_models_are_divided_in_whole_units(total: int, size: int, unit: int) -> None:
    assert all(Share.of_features(total, rank, size).start % unit == 0 for rank in range(size))


@given(num_kv_heads=st.integers(1, 9), group_size=st.integers(1, 9), data=st.data())
def test_heads_are_divided_with_the_kv_heads_that_they_read(
    num_kv_heads: int, group_size: int, data: st.DataObject
) -> None:
    num_heads = num_kv_heads * group_size
    size = data.draw(st.integers(1, num_heads))
    shares = [HeadShare.of(num_heads, num_kv_heads, rank, size) for rank in range(size)]
    assert [head for share in shares for head in range(share.query.start, share.query.stop)] == list(range(num_heads))
    assert {head for share in shares for head in range(share.kv.start, share.kv.stop)} == set(range(num_kv_heads))
    for share in shares:
        assert share.query.size == share.kv.size * share.group_size > 0
        for at, head in enumerate(range(share.query.start, share.query.stop)):
            assert share.kv.start + at // share.group_size == head // group_size


def test_one_kv_head_is_held_by_all_that_share_its_query_heads() -> None:
    shares = [HeadShare.of(6, 2, rank, 4) for rank in range(4)]
    assert [(share.query.start, share.query.stop, share.kv.start) for share in shares] == [
        (0, 1, 0),
        (1, 3, 0),
        (3, 4, 1),
        (4, 6, 1),
    ]
