"""The engines of a comparison: where each one's environment is, and what its precisions are called.

Environments are folders `NAME/venv` under what the environment variable BENCHMARK_PEERS names: else `.venv/peers`.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GROUPS = ("bf16", "int8", "int4")
MORE_FORMS = ("q4_1", "q5_0", "q5_1", "q2_k", "q3_k_m", "q5_k_m", "iq4_nl", "iq4_xs")  # of the group "gguf"
# Octavo and llama.cpp read the same file, which llama.cpp quantizes.
GGUF_FORMS = ("q8_0", "q6_k", "q4_0", "q4_k_m", *MORE_FORMS)
MISTRAL_RS_FORMS = ("q8_0", "q6_k", "q4_0", "q4_k_m")


class PeerMissingError(Exception):
    """A peer cannot run here."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer} is not there: {reason}")
        self.peer, self.reason = peer, reason


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One engine. `precisions` names, for each group, what stands beside Octavo's weights of that many bits."""

    name: str
    module: str
    precisions: dict[str, tuple[str, ...]]
    export: str | None = None  # module that writes the checkpoint in this peer's form
    has_environment: bool = True
    program_variable: str | None = None  # environment variable that names a program which the user built

    @property
    def home(self) -> Path:
        return peers_home() / self.name

    def python(self) -> Path:
        """Return the interpreter that has this peer.

        Raises:
            PeerMissingError: when it was not installed.
        """
        if self.program_variable is not None:
            self.program()
        if not self.has_environment:
            return Path(sys.executable)
        python = self.home / "venv" / "bin" / "python"
        if not (self.home / "installed").exists():
            raise PeerMissingError(self.name, f"install it by: python -m benchmarks.peers.install {self.name}")
        return python

    def program(self) -> Path:
        """Return the program that `program_variable` names.

        Raises:
            PeerMissingError: when it names none.
        """
        path = Path(os.environ.get(self.program_variable or "", ""))
        if not path.is_file():
            raise PeerMissingError(self.name, f"{self.program_variable} names no program: benchmarks/peers/README.md")
        return path.absolute()


def peers_home() -> Path:
    return Path(os.environ.get("BENCHMARK_PEERS", ROOT / ".venv" / "peers")).absolute()


OCTAVO = Peer(
    name="octavo",
    module="benchmarks.peers.octavo_peer",
    precisions={
        "bf16": ("bf16", "bf16+kv8"),
        "int8": ("int8", "int8+kv8", "q8_0", "q6_k"),
        "int4": ("int4", "int4+kv8", "q4_0", "q4_k_m"),
        "gguf": MORE_FORMS,
    },
    has_environment=False,
)
LLAMA_CPP = Peer(
    name="llama.cpp",
    module="benchmarks.peers.llama_cpp_peer",
    export="benchmarks.peers.gguf_file",
    precisions={"bf16": ("bf16",), "int8": ("q8_0", "q6_k"), "int4": ("q4_0", "q4_k_m"), "gguf": MORE_FORMS},
)
IK_LLAMA_CPP = Peer(
    name="ik_llama.cpp",
    module="benchmarks.peers.ik_llama_cpp_peer",
    precisions={"int8": ("q8_0", "q6_k"), "int4": ("q4_0", "q4_k_m"), "gguf": MORE_FORMS},
    has_environment=False,
    program_variable="IK_LLAMA_CPP",
)
MISTRAL_RS = Peer(
    name="mistral.rs",
    module="benchmarks.peers.mistral_rs_peer",
    precisions={"int8": MISTRAL_RS_FORMS[:2], "int4": MISTRAL_RS_FORMS[2:]},
)
TRANSFORMERS = Peer(
    name="transformers",
    module="benchmarks.peers.transformers_peer",
    precisions={"bf16": ("bf16",)},
    has_environment=False,
)
OPENVINO = Peer(
    name="openvino",
    module="benchmarks.peers.openvino_peer",
    export="benchmarks.peers.openvino_export",
    precisions={"bf16": ("bf16", "bf16+kv8"), "int8": ("int8+kv8",), "int4": ("int4+kv8",)},
)
VLLM = Peer(
    name="vllm",
    module="benchmarks.peers.vllm_peer",
    export="benchmarks.peers.vllm_export",
    precisions={"bf16": ("bf16",), "int8": ("w8a8",)},
)
SENTENCE_TRANSFORMERS = Peer(  # vectors only: benchmarks.offline.vectors
    name="sentence-transformers", module="benchmarks.peers.sentence_transformers_peer", precisions={}
)
ENGINES = {
    peer.name: peer
    for peer in (
        OCTAVO,
        LLAMA_CPP,
        IK_LLAMA_CPP,
        MISTRAL_RS,
        TRANSFORMERS,
        OPENVINO,
        VLLM,
        SENTENCE_TRANSFORMERS,
    )
}
