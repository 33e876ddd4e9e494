"""The list of graphs on disk: entries are read back by number of uses; a corrupt file only causes a log line."""

from pathlib import Path

import pytest

from octavo.sampling.rows import ARGMAX, Ending
from octavo.worker.decode_graphs import GraphKey, GraphUses


def key(num_rows: int, ending: Ending = ARGMAX) -> GraphKey:
    return GraphKey(num_rows=num_rows, max_context=512, ending=ending)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    return tmp_path / "graphs"


def test_the_next_start_finds_what_was_used_most_used_first() -> None:
    uses = GraphUses.of_engine("model", "device")
    for num_rows, count in ((4, 1), (8, 3), (1, 2)):
        for _ in range(count):
            uses.count(key(num_rows))
    uses.count(key(8, Ending("drawn", is_filtered=True)))
    uses.save()
    most_used = GraphUses.of_engine("model", "device").most_used(4)
    assert most_used == [key(8), key(1), key(4), key(8, Ending("drawn", is_filtered=True))]


def test_other_facts_are_another_list() -> None:
    uses = GraphUses.of_engine("model", 1)
    uses.count(key(2))
    uses.save()
    assert GraphUses.of_engine("model", 2).most_used(9) == []


def test_counts_are_kept_without_a_capture_too() -> None:
    uses = GraphUses.of_engine("model")
    for _ in range(1024):
        uses.count(key(2))
    assert GraphUses.of_engine("model").most_used(9) == [key(2)]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[[1, 512]]",
        '[[0, 512, ["drawn"], 1]]',
        '[[1, 512, ["else"], 1]]',
        '[[1, 512, ["drawn", "x"], 1]]',
        "7",
        "{}x",
    ],
)
def test_a_bad_file_is_made_again(content: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    uses = GraphUses.of_engine("model")
    uses.count(key(2))
    uses.save()
    (file,) = cache.iterdir()
    file.write_text(content)
    again = GraphUses.of_engine("model")
    assert again.most_used(9) == []
    assert "unreadable" in caplog.text
    again.count(key(4))
    again.save()
    assert GraphUses.of_engine("model").most_used(9) == [key(4)]


def test_where_nothing_can_be_written_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    uses = GraphUses.of_engine("model")
    uses.count(key(2))
    uses.save()
    assert "not kept on disk" in caplog.text
