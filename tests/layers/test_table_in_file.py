"""A table whose rows are read from its file when they are asked for, wherever that file was mapped."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.models.paged import make_context

from octavo.errors import CheckpointError
from octavo.kernels.dispatch import is_built
from octavo.layers.table_in_file import TableInFile
from octavo.layers.vocabulary import Embedding

TABLE = torch.randn(50, 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
IDS = torch.tensor([0, 49, 7, 7, 31])

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says where a tensor lies")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "name with blanks.safetensors"
    save_file({"before": torch.ones(33), "table": TABLE, "wide": TABLE.double()}, path)
    return path


def mapped(path: Path, name: str = "table") -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def table_of(path: Path) -> TableInFile:
    found = TableInFile.from_mapped(mapped(path))
    assert found is not None
    return found


def test_rows_are_those_of_the_tensor(path: Path) -> None:
    table = table_of(path)  # the mapping is gone
    assert torch.equal(table.rows(IDS), TABLE[IDS])
    assert table.rows(IDS[:0]).shape == (0, 24)
    assert table.nbytes == TABLE.nbytes


def test_a_part_of_a_tensor_is_a_table_too(path: Path) -> None:
    part = TableInFile.from_mapped(mapped(path)[20:40])
    assert part is not None
    assert torch.equal(part.rows(torch.tensor([0, 19])), TABLE[[20, 39]])


@pytest.mark.parametrize("row", [-1, 50])
def test_what_is_no_row_is_refused(path: Path, row: int) -> None:
    with pytest.raises(IndexError, match=f"row {row} of a table of 50"):
        table_of(path).rows(torch.tensor([3, row]))


def test_what_is_in_memory_has_no_file(path: Path) -> None:
    assert TableInFile.from_mapped(mapped(path).clone()) is None
    assert TableInFile.from_mapped(mapped(path).T) is None


def test_a_file_that_was_deleted_or_replaced_before_is_not_read(path: Path) -> None:
    tensor = mapped(path)
    path.unlink()
    assert TableInFile.from_mapped(tensor) is None
    save_file({"before": torch.ones(33), "table": TABLE + 1, "wide": TABLE.double()}, path)
    assert TableInFile.from_mapped(tensor) is None


def test_a_file_that_is_deleted_later_stays(path: Path) -> None:
    table = table_of(path)
    path.unlink()
    assert torch.equal(table.rows(IDS), TABLE[IDS])


def test_a_file_that_is_cut_off_is_an_error_that_names_it(path: Path) -> None:
    table = table_of(path)
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError, match=r"blanks\.safetensors: 0 bytes instead of 48: truncated"):
        table.rows(IDS)


@pytest.mark.parametrize("num_bytes", [1000, 1 << 20])
def test_pieces_are_all_of_it(path: Path, num_bytes: int) -> None:
    expected = TABLE.view(torch.uint8).numpy().tobytes()
    assert b"".join(table_of(path).pieces(num_bytes)) == expected


@pytest.mark.skipif(not is_built(), reason="integers want the C++ kernels")
@pytest.mark.parametrize("name", ["table", "wide"])
def test_an_embedding_beside_a_quantized_head_takes_no_memory(path: Path, name: str) -> None:
    embedding = Embedding(50, 24, context=make_context(torch.bfloat16, quantization="int8"), has_tied_head=True)
    embedding.load_weight("weight", mapped(path, name))
    assert embedding.bytes_in_file == mapped(path, name).nbytes
    rows = embedding(IDS)
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, TABLE[IDS])
