"""Two hosts on one machine: network namespaces joined by a cable (veth), each with an address and a Ray node.

    sudo python -m tests.ray.two_hosts

runs the bundled model with two ranks, one on each host, and compares with one rank. Nothing of the machine's own
network is touched; both namespaces and all of their processes are gone at the end. The cluster has a token of its own.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PORT = 6379
PROGRAM = """
import json, sys
from octavo import LLM, SamplingParams

degree = sys.argv[1]
params = SamplingParams(temperature=0.0, max_tokens=24)
options = dict(dtype="float32", num_kv_blocks=128, max_num_seqs=4)
answers = []
for ranks in ({}, {degree: 2, "distributed_executor_backend": "ray"}):
    with LLM("demo", **options, **ranks) as llm:
        outputs = llm.generate(["Octavo is", "What is a block?"], params, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
        executor = llm.engine.front.client._core._executor
        hosts = executor.ranks.hosts if ranks else []
print("RESULT", json.dumps({"hosts": hosts, "is_equal": answers[0] == answers[1], "tokens": answers[0]}))
"""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A network namespace with one address."""

    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]


def can_make_hosts() -> bool:
    """Say whether this user, on this machine, may make network namespaces."""
    if os.geteuid() != 0:
        return False
    name = f"octavo-try-{uuid.uuid4().hex[:6]}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return made


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts and a cable between them; take all down with whatever runs there."""
    tag = uuid.uuid4().hex[:6]
    hosts = (
        Host(namespace=f"octavo-{tag}-a", address="10.231.77.1"),
        Host(namespace=f"octavo-{tag}-b", address="10.231.77.2"),
    )
    try:
        for host in hosts:
            run("ip", "netns", "add", host.namespace)
        run("ip", "link", "add", f"va{tag}", "netns", hosts[0].namespace, "type", "veth", "peer", "name", f"vb{tag}",
            "netns", hosts[1].namespace)  # fmt: skip
        for host, device in zip(hosts, (f"va{tag}", f"vb{tag}"), strict=True):
            run(*host.command("ip", "address", "add", f"{host.address}/24", "dev", device))
            for name in ("lo", device):
                run(*host.command("ip", "link", "set", name, "up"))
        yield hosts
    finally:
        for host in hosts:
            end_all_in(host)
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False)


@contextlib.contextmanager
def ray_cluster(hosts: tuple[Host, Host]) -> Iterator[dict[str, str]]:
    """Start a Ray head on the first host and a node on the second, one core each; yield a user's environment."""
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--disable-usage-stats"]
    # Short: Ray's sockets lie below, and a socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="or-", dir="/tmp") as folder:
        head, node = hosts
        address = f"{head.address}:{PORT}"
        run(*head.command(*ray, "--head", f"--port={PORT}", f"--node-ip-address={head.address}",
            f"--temp-dir={folder}", "--include-dashboard=false"), environment=environment)  # fmt: skip
        run(*node.command(*ray, f"--address={address}", f"--node-ip-address={node.address}"), environment=environment)
        yield {**environment, "RAY_ADDRESS": address}
        for host in hosts:
            end_all_in(host)


def run_program(host: Host, environment: dict[str, str], degree: str) -> Any:
    """Run the program on one host, as a user of the cluster would; return what it found.

    Raises:
        RuntimeError: it failed; with all that it said.
    """
    command = host.command(sys.executable, "-c", PROGRAM, degree)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=150, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not found:
        raise RuntimeError(done.stdout + done.stderr)
    return json.loads(found[0].removeprefix("RESULT"))


def run(*command: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")


def end_all_in(host: Host) -> None:
    """Kill the processes of a namespace, and no others."""
    listed = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=False)
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def main() -> int:
    """Run it once for each degree, for people."""
    is_equal = True
    with two_hosts() as hosts, ray_cluster(hosts) as environment:
        for degree in ("tensor_parallel_size", "pipeline_parallel_size"):
            result = run_program(hosts[0], environment, degree)
            sys.stdout.write(f"{degree}=2 on {' and '.join(result['hosts'])}: ")
            sys.stdout.write("the tokens of one rank\n" if result["is_equal"] else "OTHER TOKENS than one rank\n")
            is_equal &= result["is_equal"]
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
