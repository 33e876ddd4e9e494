"""Modules of a peer, run in its own environment: what measures it, and what writes its form of a model."""

import os
import subprocess
from pathlib import Path

from benchmarks.peers.registry import GGUF_FORMS, LLAMA_CPP, ROOT, VLLM, Peer

_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "OCTAVO_CPU_LEVEL")


def environment(peer: Peer) -> dict[str, str]:
    """Return what the peer needs, and nothing that a shell has set by chance (thread counts, paths, hubs).

    Raises:
        PeerMissingError: when its program is not there.
    """
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    paths = [str(ROOT)] if peer.has_environment else [str(ROOT), str(ROOT / "src")]
    if peer.program_variable is not None:
        kept[peer.program_variable] = str(peer.program())
    always = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    if peer is LLAMA_CPP:
        always["LLAMA_CPP_LIB_PATH"] = str(peer.home / "build" / "bin")
    if peer is VLLM:
        # What its manual recommends and its environment holds, and no word home.
        always["LD_PRELOAD"] = str(peer.home / "venv" / "lib" / "libiomp5.so")
        always |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": str(peer.home / "cache")}
        # Left to itself its server keeps one core for the API: of two, one computes, at half the speed.
        always["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{(os.cpu_count() or 1) - 1}"
    return kept | always


def run_module(peer: Peer, precision: str, module: str, model: Path, arguments: list[str], timeout_s: float) -> str:
    """Return what a module of a peer printed.

    Raises:
        PeerMissingError: when the peer is not installed.
        RuntimeError: with the end of its output, when it fails.
    """
    done = subprocess.run(
        [str(peer.python()), "-m", module, str(model), "--precision", precision, *arguments],
        check=False,
        cwd=ROOT,
        env=environment(peer),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{peer.name} {precision}: exit {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def export(peer: Peer, precision: str, model: Path, timeout_s: float) -> None:
    """Write the checkpoint in the form of a peer, where that is missing, so that no measured start pays for it; a peer
    that is not there says so now.

    Raises:
        PeerMissingError: when the peer is not installed.
        RuntimeError: when it fails.
    """
    peer.python()
    exporter = LLAMA_CPP if precision in GGUF_FORMS else peer
    if exporter.export is not None:
        run_module(exporter, precision, exporter.export, model, [], timeout_s)
