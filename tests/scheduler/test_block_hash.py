"""Block hashes: by content, chained, and the same in every process."""

import hashlib
import os
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest

from octavo.scheduler.block_manager import chain_hashes, root_hash

PINNED = "5e612e9214355578cb59e69c33f7ade7c31a0598b83811deb9255d85b474b8be"
PROGRAM = """
import numpy as np
from octavo.scheduler.block_manager import chain_hashes, root_hash
print([name.hex() for name in chain_hashes(root_hash(["tenant"]), np.arange(8, dtype=np.int32), 4)][-1])
"""


def names(token_ids: list[int], block_size: int = 4, salt: str | None = None) -> list[bytes]:
    root = root_hash([] if salt is None else [salt])
    return list(chain_hashes(root, np.array(token_ids, dtype=np.int32), block_size))


def test_a_known_name_never_changes() -> None:
    """Names outlive processes (and shall one day cross machines), so the formula is part of the contract."""
    assert names(list(range(8)), salt="tenant")[-1].hex() == PINNED


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_names_do_not_depend_on_the_process(hash_seed: str) -> None:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == PINNED


def test_only_full_blocks_have_names() -> None:
    assert [len(names(list(range(count)))) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_longer_prompt_keeps_the_names_of_its_beginning() -> None:
    assert names(list(range(12)))[:2] == names(list(range(8)))


def test_a_name_depends_on_every_token_before() -> None:
    one, other = names([1, 2, 3, 4, 5, 6, 7, 8]), names([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[1] != other[1]


def test_equal_tokens_at_another_place_have_another_name() -> None:
    first, second = names([1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second


def test_a_salt_separates_tenants() -> None:
    tokens = list(range(8))
    assert len({names(tokens, salt=salt)[0] for salt in (None, "", "a", "b")}) == 4


def test_extra_keys_do_not_run_together() -> None:
    assert len({root_hash(keys) for keys in ([], ["ab"], ["a", "b"], ["", "ab"], ["ab", ""])}) == 5


def test_names_are_made_one_at_a_time() -> None:
    """A look-up that misses early must not have hashed the whole of a long prompt."""
    made = islice(chain_hashes(root_hash(), np.arange(1 << 20, dtype=np.int32), 4), 1)
    assert next(made) == hashlib.sha256(root_hash() + np.arange(4, dtype="<i4").tobytes()).digest()
