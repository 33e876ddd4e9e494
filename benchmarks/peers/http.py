"""Servers beside each other: Octavo's, llama.cpp's and vLLM's, all asked by `octavo bench serve`, in turns.

    python -m benchmarks.peers.http [--servers octavo:bf16 llama.cpp:q8_0 vllm:w8a8] [--repeats 3] [--out FILE]

32 streams at once, 128 random tokens in and 64 out, 64 requests; server and client share this machine's cores. Each
server is asked a little at first, and then left alone for ten seconds, as one is that was not started for a benchmark.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.geometry import QWEN3_0_6B, kv_bytes_per_token
from benchmarks.peers import checkpoint
from benchmarks.peers.environment import environment, export
from benchmarks.peers.registry import LLAMA_CPP, OCTAVO, ROOT, VLLM, Peer, PeerMissingError, peers_home

STREAMS, NUM_IN, NUM_OUT = 32, 128, 64
ROOM = 256  # tokens for each stream's request
START_S, QUIET_S = 180.0, 10.0
EXPORT_S = 900.0  # how long writing a peer's form of the model may take
SHOWN = {
    "tokens/s": "output_tokens_per_s",
    "TTFT p50 ms": "time_to_first_token_ms_p50",
    "TTFT p99 ms": "time_to_first_token_ms_p99",
    "ITL p50 ms": "inter_token_latency_ms_p50",
    "start, s": "start_s",
}


def octavo_command(model: Path, precision: str, port: int) -> list[str]:
    flags = ["--port", str(port), "--no-access-log", "--max-num-seqs", str(STREAMS), "--max-model-len", "1024"]
    quantization = [] if precision == "bf16" else ["--quantization", precision]
    return [sys.executable, "-m", "octavo.cli.main", "serve", str(model), *flags, *quantization]


def llama_command(model: Path, precision: str, port: int) -> list[str]:
    """`llama-server` with a slot per stream, each with room for its request."""
    LLAMA_CPP.python()
    flags = ["--port", str(port), "--parallel", str(STREAMS), "--ctx-size", str(STREAMS * ROOM), "--threads", "2"]
    program = LLAMA_CPP.home / "build" / "bin" / "llama-server"
    return [
        str(program),
        "--model",
        str(model / f"{precision}.gguf"),
        *flags,
        "--flash-attn",
        "on",
        "--no-cache-prompt",
    ]


def vllm_command(model: Path, precision: str, port: int) -> list[str]:
    """vLLM's server with room for all streams."""
    folder = model if precision == "bf16" else model / f"vllm-{precision}"
    kv_bytes = STREAMS * ROOM * kv_bytes_per_token(QWEN3_0_6B)
    flags = ["--port", str(port), "--dtype", "bfloat16", "--max-num-seqs", str(STREAMS), "--max-model-len", "1024"]
    memory = ["--kv-cache-memory-bytes", str(kv_bytes), "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    return [str(VLLM.python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *flags, *memory]


COMMANDS = {
    "octavo": (OCTAVO, octavo_command, "/ready"),
    "llama.cpp": (LLAMA_CPP, llama_command, "/health"),
    "vllm": (VLLM, vllm_command, "/health"),
}


@contextmanager
def serving(peer: Peer, command: list[str], url: str, ready: str) -> Iterator[float]:
    """Start a server; give the seconds until it was ready."""
    with tempfile.TemporaryFile("w+") as log:
        begun_s = time.perf_counter()
        server = subprocess.Popen(command, cwd=ROOT, env=environment(peer), stdout=log, stderr=log)
        try:
            wait_until_ready(server, url + ready)
            yield time.perf_counter() - begun_s
        except RuntimeError as error:
            log.seek(0)
            raise RuntimeError(f"{error}\n{log.read()[-2000:]}") from error
        finally:
            server.terminate()
            server.wait()


def wait_until_ready(server: "subprocess.Popen[bytes]", url: str) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and server.poll() is None:
        try:
            with urlopen(url):
                return
        except (URLError, ConnectionError):  # not listening yet, or a 503 that says it is loading
            time.sleep(0.05)
    raise RuntimeError(f"the server does not get ready: {server.args!r}")


def measure(url: str, num_prompts: int) -> dict[str, float]:
    """Warm the server up with a quarter of the streams, leave it alone, measure it; return the client's report."""
    ask(url, num_prompts=STREAMS // 4, seed=1)
    time.sleep(QUIET_S)
    return ask(url, num_prompts=num_prompts, seed=0)


def ask(url: str, *, num_prompts: int, seed: int) -> dict[str, float]:
    """Run `octavo bench serve`; return its report."""
    command = [sys.executable, "-m", "octavo.cli.main", "bench", "serve", "--url", url, "--json", "--seed", str(seed)]
    load = ["--concurrency", str(STREAMS), "--num-prompts", str(num_prompts), "--warmup", "0"]
    lengths = ["--input-len", str(NUM_IN), "--output-len", str(NUM_OUT)]
    done = subprocess.run(
        [*command, *load, *lengths], check=False, capture_output=True, text=True, cwd=ROOT, env=environment(OCTAVO)
    )
    if done.returncode != 0:
        raise RuntimeError(f"octavo bench serve: exit {done.returncode}: {done.stderr[-2000:]}")
    report: dict[str, float] = json.loads(done.stdout)
    return report


def export_for(server: str, model: Path) -> None:
    """Write the file that `llama.cpp:q8_0` or the like reads, where it is missing."""
    name, _, precision = server.partition(":")
    export(COMMANDS[name][0], precision, model, EXPORT_S)


def run_once(server: str, model: Path, num_prompts: int) -> dict[str, float]:
    """Return the client's report about `octavo:int8` or the like, and `start_s`.

    Raises:
        PeerMissingError: when the server is not installed.
        RuntimeError: when it does not start, or fails its client.
    """
    name, _, precision = server.partition(":")
    peer, command, ready = COMMANDS[name]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with serving(peer, command(model, precision, port), url, ready) as start_s:
        return {**measure(url, num_prompts), "start_s": start_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--servers",
        nargs="+",
        default=["octavo:bf16", "octavo:int8", "llama.cpp:bf16", "llama.cpp:q8_0", "vllm:bf16", "vllm:w8a8"],
    )
    parser.add_argument("--num-prompts", type=int, default=2 * STREAMS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write every report as JSON")
    options = parser.parse_args()
    model = checkpoint.make(peers_home() / "models" / "qwen3-0.6b", QWEN3_0_6B)
    runs: dict[str, list[dict[str, float]]] = {server: [] for server in options.servers}
    failures: dict[str, str] = {}
    for turn in range(options.repeats):
        for server in [server for server in options.servers if server not in failures]:
            try:
                if turn == 0:
                    export_for(server, model)
                runs[server].append(run_once(server, model, options.num_prompts))
            except (PeerMissingError, RuntimeError, subprocess.TimeoutExpired) as error:
                failures[server] = str(error)
    print("| server | " + " | ".join(SHOWN) + " |\n| --- |" + " --- |" * len(SHOWN))
    for server, reports in runs.items():
        figures = [f"{statistics.median(run[key] for run in reports):,.1f}" for key in SHOWN.values() if reports]
        print(f"| {server} | " + " | ".join(figures or [failures[server].splitlines()[0]]) + " |")
    if options.out:
        options.out.write_text(json.dumps({"runs": runs, "failures": failures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
