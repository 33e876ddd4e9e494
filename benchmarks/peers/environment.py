"""The environment variables that a peer runs with."""

import os

from benchmarks.peers.registry import LLAMA_CPP, ROOT, VLLM, Peer

_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "OCTAVO_CPU_LEVEL")


def environment(peer: Peer) -> dict[str, str]:
    """Return what the peer needs, and nothing that a shell has set by chance (thread counts, paths, hubs)."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    paths = [str(ROOT)] if peer.has_environment else [str(ROOT), str(ROOT / "src")]
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
