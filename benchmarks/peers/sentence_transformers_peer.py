"""sentence-transformers' `encode`, in an environment of its own: passages a second, for `benchmarks.offline.vectors`.

python -m benchmarks.peers.sentence_transformers_peer MODEL --dtype float32 --passages 64
"""

import argparse
import json
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer

from benchmarks.peers.passages import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder that benchmarks.offline.vectors wrote")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--passages", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = SentenceTransformer(str(options.model), device="cpu", model_kwargs={"dtype": dtype})
    print(json.dumps(measure(options.passages, lambda texts: model.encode(texts).tolist())))


if __name__ == "__main__":
    main()
