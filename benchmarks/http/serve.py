"""`octavo serve` under the loads of `octavo bench serve`: closed loops of several widths, an open loop, a crowd.

    python -m benchmarks.http.serve [--model demo] [--num-prompts 64] [--json FILE]

Server and client share this machine's cores; `client us/token` says how much of them the client took.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

START_S = 120.0
LOADS: dict[str, list[str]] = {
    "1 at a time": ["--concurrency", "1"],
    "8 at a time": ["--concurrency", "8"],
    "32 at a time": ["--concurrency", "32"],
    "5 per second": ["--rate", "5"],
    "all at once": [],
}
SHOWN = {
    "requests/s": "requests_per_s",
    "tokens/s": "output_tokens_per_s",
    "TTFT p50 ms": "time_to_first_token_ms_p50",
    "TTFT p99 ms": "time_to_first_token_ms_p99",
    "ITL p50 ms": "inter_token_latency_ms_p50",
    "ITL p99 ms": "inter_token_latency_ms_p99",
    "client us/token": "client_cpu_us_per_token",
}


@contextmanager
def serving(model: str) -> Iterator[str]:
    """Start a server on a free port; give its URL when it is ready."""
    with tempfile.TemporaryFile("a+") as log:
        command = [sys.executable, "-m", "octavo.cli.main", "serve", model, "--port", "0", "--no-access-log"]
        server = subprocess.Popen(command, stderr=log)
        try:
            url = _wait_for_url(server, log)
            _wait_until_ready(url)
            yield url
        finally:
            server.terminate()
            server.wait()


def _wait_for_url(server: "subprocess.Popen[bytes]", log: Any) -> str:
    deadline_s = time.monotonic() + START_S
    while True:
        log.seek(0)
        if found := re.search(r"listening on (\S+)\n", log.read()):
            return found[1]
        if server.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit("the server does not start")
        time.sleep(0.05)


def _wait_until_ready(url: str) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        with suppress(HTTPError), urlopen(f"{url}/ready"):
            return
        time.sleep(0.05)
    raise SystemExit("the server does not get ready")


def measure(url: str, num_prompts: int, flags: list[str]) -> dict[str, float]:
    """Run `octavo bench serve`; return its report."""
    command = [sys.executable, "-m", "octavo.cli.main", "bench", "serve", "--url", url, "--json"]
    lengths = ["--num-prompts", str(num_prompts), "--input-len", "128", "--output-len", "64", "--warmup", "8"]
    done = subprocess.run([*command, *lengths, *flags], check=True, stdout=subprocess.PIPE)
    report: dict[str, float] = json.loads(done.stdout)
    return report


def main() -> None:
    """Print a table; write all figures where `--json` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with serving(options.model) as url:
        reports = {name: measure(url, options.num_prompts, flags) for name, flags in LOADS.items()}
    print(" | ".join(["load", *SHOWN]))
    for name, report in reports.items():
        print(" | ".join([name, *(f"{report[key]:.1f}" for key in SHOWN.values())]))
    if options.json is not None:
        options.json.write_text(json.dumps(reports, indent=1) + "\n")


if __name__ == "__main__":
    main()
