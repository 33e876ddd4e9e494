"""The environment variables that a peer runs with."""

import os

from benchmarks.peers.registry import LLAMA_CPP, ROOT, Peer

_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "OCTAVO_PEERS", "OCTAVO_CPU_LEVEL")


def environment(peer: Peer) -> dict[str, str]:
    """Return what the peer needs, and nothing that a shell has set by chance (thread counts, paths, hubs)."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    paths = [str(ROOT)] if peer.has_environment else [str(ROOT), str(ROOT / "src")]
    always = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    if peer is LLAMA_CPP:
        always["LLAMA_CPP_LIB_PATH"] = str(peer.home / "build" / "bin")
    return kept | always
