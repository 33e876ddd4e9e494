"""One rank as a process: `run_in_processes` is `run_ranks` with real processes, for what threads may hide."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from octavo.config.parallel import ParallelConfig, RankPlace, Rendezvous
from octavo.distributed.connect import make_groups

_ROOT = Path(__file__).parents[2]


def run_in_processes(function: str, arguments: Sequence[Any], size: int) -> list[Any]:
    """Call "module:function"(groups, *arguments) in `size` ranks; return what they answer, all of it as JSON."""
    files = [os.memfd_create("store"), os.memfd_create("memory")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.rank_process", json.dumps([rank, size, files, function])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=files,
            env=environment,
        )
        for rank in range(size)
    ]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(json.dumps(arguments).encode())
        rank.stdin.close()
    for file in files:
        os.close(file)
    answers = []
    for rank in ranks:
        assert rank.stdout is not None
        answers.append(rank.stdout.read())
        rank.stdout.close()
    assert [rank.wait() for rank in ranks] == [0] * size
    return [json.loads(answer) for answer in answers]


def main() -> None:
    rank, size, files, function = json.loads(sys.argv[1])
    arguments = json.load(sys.stdin)
    place = RankPlace.of(rank, ParallelConfig(tensor_parallel_size=size))
    groups = make_groups(place, Rendezvous(store_fd=files[0], memory_fd=files[1]), torch.device("cpu"))
    module, _, name = function.partition(":")
    json.dump(getattr(import_module(module), name)(groups, *arguments), sys.stdout)


if __name__ == "__main__":
    main()
