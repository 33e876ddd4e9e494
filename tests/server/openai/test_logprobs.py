"""Log-probabilities in both shapes, without a model: rows appear with their text and never outlive it."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.demo import demo_model_path
from octavo.outputs import Logprob
from octavo.server.openai.replies import ChatRows, CompletionRows, Table, TokenNames, joined, prompt_tables
from octavo.tokenizer.detokenizer import Detokenizer
from octavo.tokenizer.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_path(Path(demo_model_path()))
NAMES = TokenNames(TOKENIZER)
TEXT = "Octavo, 東京 🐈 and café"
TOKENS = TOKENIZER.encode(TEXT)


def table(token_id: int, logprob: float = -1.0, rank: int = 1, others: Sequence[int] = ()) -> Table:
    rest = {id_: Logprob(logprob=-2.0 - id_, rank=2 + i, decoded_token="") for i, id_ in enumerate(others)}
    return {token_id: Logprob(logprob=logprob, rank=rank, decoded_token="")} | rest


def rows_of(pieces: list[list[int]], *, is_cut: bool) -> tuple[list[str], bytes]:
    """Feed tokens as they would stream; return the token texts of the rows and the bytes of all of them."""
    rows = ChatRows(NAMES, 0, skips_special_tokens=True)
    detokenizer = Detokenizer(TOKENIZER.byte_table(True))
    shown = []
    for piece in pieces:
        shown += rows.push(piece, [table(id_) for id_ in piece], detokenizer.push(piece))
    shown += rows.finish(is_cut=is_cut)
    return [row.token for row in shown], b"".join(bytes(row.bytes) for row in shown)


@given(cuts=st.lists(st.integers(0, len(TOKENS)), max_size=6))
def test_the_bytes_of_all_rows_are_the_text_however_it_is_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(TOKENS)]
    pieces = [TOKENS[start:end] for start, end in itertools.pairwise(places)]
    texts, data = rows_of(pieces, is_cut=False)
    assert data.decode() == TEXT
    assert len(texts) == len(TOKENS)


def test_half_a_character_waits_for_its_other_half() -> None:
    rows = ChatRows(NAMES, 0, skips_special_tokens=True)
    cat = TOKENIZER.encode("🐈")
    assert len(cat) > 1
    assert rows.push(cat[:1], [table(cat[0])], "") == []
    assert len(rows.push(cat[1:], [table(id_) for id_ in cat[1:]], "🐈")) == len(cat)


def test_what_a_stop_string_takes_back_has_no_row() -> None:
    tokens = TOKENIZER.encode("one stop")
    rows = ChatRows(NAMES, 0, skips_special_tokens=True)
    shown = rows.push(tokens, [table(id_) for id_ in tokens], "one")
    assert b"".join(bytes(row.bytes) for row in shown) == b"one"
    assert rows.finish(is_cut=True) == []


def test_the_end_token_has_a_row_only_where_it_did_not_end_the_text() -> None:
    end = TOKENIZER.eos_token_id
    assert end is not None
    tokens = [*TOKENIZER.encode("hi"), end]
    assert len(rows_of([tokens], is_cut=True)[0]) == len(tokens) - 1
    assert len(rows_of([tokens], is_cut=False)[0]) == len(tokens)


def test_the_best_are_in_order_and_as_many_as_asked_for() -> None:
    rows = ChatRows(NAMES, 2, skips_special_tokens=True)
    (row,) = rows.push([300], [table(300, rank=7, others=[5, 6])], "x")
    assert [top.logprob for top in row.top_logprobs] == [-7.0, -8.0]
    assert row.logprob == -1.0


def test_json_has_no_infinity() -> None:
    rows = ChatRows(NAMES, 1, skips_special_tokens=True)
    (row,) = rows.push([300], [table(300, logprob=float("-inf"))], "x")
    assert row.logprob == row.top_logprobs[0].logprob == -9999.0


def test_the_token_that_stands_there_is_always_in_the_map() -> None:
    lists = CompletionRows(NAMES, 1).push([300], [table(300, logprob=-9.0, rank=40, others=[50])])
    assert lists.top_logprobs == [{TOKENIZER.token_text(300): -9.0, TOKENIZER.token_text(50): -52.0}]


def test_lists_are_equally_long_and_offsets_are_characters() -> None:
    rows = CompletionRows(NAMES, 0)
    parts = [rows.push([id_], [table(id_) if index else None]) for index, id_ in enumerate(TOKENS)]
    lists = joined(parts)
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == len(lists.text_offset)
    assert (lists.token_logprobs[0], lists.top_logprobs[0]) == (None, None)
    whole = [name for name in lists.tokens if not name.startswith("bytes:")]
    assert all(TEXT[offset:].startswith(name) for name, offset in zip(lists.tokens, lists.text_offset, strict=True)
               if name in whole)  # fmt: skip
    assert len(whole) < len(lists.tokens), "the text must have characters that no token holds alone"


def test_halves_of_characters_have_names_of_their_own() -> None:
    halves = [id_ for id_ in range(TOKENIZER.vocab_size) if "\ufffd" in TOKENIZER.token_text(id_)]
    names = {NAMES.unique(id_) for id_ in halves}
    assert len(names) == len(halves) > 1
    assert all(name.startswith("bytes:\\x") for name in names)


def test_tokens_may_go_by_their_ids() -> None:
    names = TokenNames(TOKENIZER, as_ids=True)
    assert names.readable(7) == names.unique(7) == "token_id:7"


@pytest.mark.parametrize("given_table", [None, table(5, others=[6])])
def test_prompt_logprobs_go_by_token_id(given_table: Table | None) -> None:
    (entry,) = prompt_tables([given_table])
    assert entry is None if given_table is None else list(entry or {}) == ["5", "6"]
