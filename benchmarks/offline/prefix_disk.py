"""Time to the first token of a long prompt: computed, found in memory, and found on disk after a restart.

    python -m benchmarks.offline.prefix_disk [MODEL] [--tokens 4096] [--restarts 5] [--json FILE]

The engine is a process of its own, replaced for each restart. Times of the disk alone are one thread's: to read
the blocks from the page cache into memory that is in use, and to compute their checksums.
"""

import argparse
import json
import os
import random
import tempfile
import time
import zlib
from pathlib import Path
from statistics import median

from octavo import LLM, SamplingParams

_FIRST = SamplingParams(temperature=0.0, max_tokens=1)
_IDLE_S = 8.0  # for the engine to prefault KV memory, and to write


def first_token_s(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to the first token, and how many tokens of the prompt were found."""
    [output] = llm.generate([{"prompt_token_ids": prompt}], _FIRST, use_tqdm=False)
    times = output.metrics
    assert times.first_token_time_s is not None
    return times.first_token_time_s - times.arrival_time_s, times.num_cached_tokens


def disk_s(folder: Path) -> tuple[float, float, int]:
    """Return the seconds to read all blocks, and to compute their checksums; and their bytes."""
    [path] = folder.glob("prefix/*/0.blocks")
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(path.stat().st_size)
        times = []
        for _ in range(5):
            file.seek(0)
            start_s = time.perf_counter()
            file.readinto(buffer)
            read_s = time.perf_counter() - start_s
            zlib.crc32(buffer)
            times.append((read_s, time.perf_counter() - start_s - read_s))
    return min(read for read, _ in times), min(check for _, check in times), len(buffer)


def measure(model: str, num_tokens: int, num_restarts: int) -> dict[str, object]:
    """Return all times in seconds: medians, and each."""
    source = random.Random(1)
    prompt = [source.randrange(100, 20000) for _ in range(num_tokens + 1)]
    memory, restarted, computed_s = list[float](), list[float](), 0.0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OCTAVO_CACHE"] = folder
        for number in range(num_restarts + 1):
            with LLM(model, engine_process=True, prefix_cache_disk=2.0) as llm:
                time.sleep(_IDLE_S)
                took_s, num_found = first_token_s(llm, prompt)
                assert num_found == (num_tokens if number else 0), f"{num_found} tokens found"
                if number:
                    restarted.append(took_s)
                else:
                    computed_s = took_s
                memory += [first_token_s(llm, prompt)[0] for _ in range(4)]
                time.sleep(_IDLE_S if not number else 0.0)
        read_s, check_s, num_bytes = disk_s(Path(folder))
    return {
        "model": model, "tokens": num_tokens, "kv_mb": num_bytes / 1e6, "computed_s": computed_s,
        "in_memory_s": median(memory), "after_restart_s": median(restarted), "read_s": read_s, "checksum_s": check_s,
        "each_in_memory_s": memory, "each_after_restart_s": restarted,
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options.model, options.tokens, options.restarts)
    for name, value in result.items():
        print(f"{name:16} {value:.4f}" if isinstance(value, float) else f"{name:16} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
