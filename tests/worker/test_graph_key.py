"""Buckets: every size fits into its bucket, and no bucket is much larger than needed."""

from tests.breadth import each

from octavo.worker.decode_graphs import context_bucket, row_bucket


def test_row_buckets_are_the_known_ones() -> None:
    sizes = sorted({row_bucket(num_rows) for num_rows in range(1, 257)})
    assert sizes == [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16)]


@each("num_rows", range(1, 513))
def test_a_bucket_holds_its_rows_and_is_its_own(num_rows: int) -> None:
    bucket = row_bucket(num_rows)
    assert num_rows <= bucket < max(2 * num_rows, num_rows + 16)
    assert row_bucket(bucket) == bucket


def test_contexts_double_up_to_the_models_own() -> None:
    assert [context_bucket(length, 5000) for length in (1, 512, 513, 1024, 1025, 4097, 5000)] == [
        512,
        512,
        1024,
        1024,
        2048,
        5000,
        5000,
    ]
    assert context_bucket(7, 64) == 64
