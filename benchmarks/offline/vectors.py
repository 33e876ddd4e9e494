"""Octavo beside sentence-transformers: passages of 128 tokens made vectors, a second.

    python -m benchmarks.peers.install sentence-transformers
    python -m benchmarks.offline.vectors --geometry bert-base qwen3-embedding-0.6b [--passages 64] [--repeats 3]
        [--forms float32 bfloat16 int8] [--out FILE]

Random weights, read by both from one checkpoint; text in, so that both tokenize. Each engine runs in a process of its
own, in turns; medians. `int8` are Octavo's weights of 8 bits, made at load. Cosine: the least of 8 vectors' with those
of sentence-transformers in float32. The bound is the float32 matrix rate of torch, measured in the same run, over the
layers' products.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any

from benchmarks.geometry import QWEN3_0_6B
from benchmarks.offline.compare import timed
from benchmarks.peers.environment import environment
from benchmarks.peers.passages import NUM_WORDS, measure
from benchmarks.peers.registry import ROOT, SENTENCE_TRANSFORMERS
from octavo.config.families.bert import BERT_DEFAULTS

GEOMETRIES: dict[str, dict[str, Any]] = {
    "bert-base": {"model_type": "bert", "pad_token_id": 0, **BERT_DEFAULTS},
    "qwen3-embedding-0.6b": {name: QWEN3_0_6B[name] for name in QWEN3_0_6B if name not in ("dtype", "architectures")},
}
FORMS = ("float32", "bfloat16", "int8")
_POOLING = {"bert-base": "mean_tokens", "qwen3-embedding-0.6b": "lasttoken"}
_RATE_SIZE = 2048
_TIMEOUT_S = 3600.0


def write_model(folder: Path, geometry: str) -> int:
    """Write random weights, a tokenizer of words and sentence-transformers' files; return the weights of all layers."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**GEOMETRIES[geometry])
    model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<unk>": 1} | {f"w{at}": at for at in range(2, config.vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options = {"pad_token": "<pad>", "unk_token": "<unk>", "model_max_length": 512}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **options).save_pretrained(folder)
    flags = {f"pooling_mode_{kind}": kind == _POOLING[geometry] for kind in _POOLING.values()}
    pooling = {"word_embedding_dimension": config.hidden_size, **flags}
    modules = [("Transformer", "", None), ("Pooling", "1_Pooling", pooling), ("Normalize", "2_Normalize", {})]
    listed = []
    for at, (kind, path, facts) in enumerate(modules):
        listed.append({"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"})
        if facts is not None:
            (folder / path).mkdir()
            (folder / path / "config.json").write_text(json.dumps(facts))
    (folder / "modules.json").write_text(json.dumps(listed))
    return sum(weight.numel() for name, weight in model.named_parameters() if weight.dim() == 2 and "embed" not in name)


def run_octavo(folder: Path, form: str, count: int) -> dict[str, object]:
    from octavo import LLM

    dtype = "bfloat16" if form == "int8" else form
    options: dict[str, Any] = {"quantization": "int8"} if form == "int8" else {}
    llm = LLM(str(folder), dtype=dtype, max_model_len=512, enable_prefix_caching=False, **options)
    return measure(count, lambda texts: [output.embedding or [] for output in llm.embed(texts, use_tqdm=False)])


def run_in_process(engine: str, folder: Path, form: str, count: int) -> dict[str, Any]:
    if engine == "octavo":
        command = [sys.executable, "-m", "benchmarks.offline.vectors", "--folder", str(folder), "--forms", form]
        variables = None
    else:
        peer = SENTENCE_TRANSFORMERS
        command = [str(peer.python()), "-m", peer.module, str(folder), "--dtype", form]
        variables = environment(peer)
    done = subprocess.run(
        [*command, "--passages", str(count)],
        check=False,
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{engine} {form}: exit {done.returncode}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def float32_rate() -> float:
    """Return torch's operations a second in products of matrices."""
    import torch

    a = torch.randn(_RATE_SIZE, _RATE_SIZE)
    return 2 * _RATE_SIZE**3 / min(timed(partial(torch.mm, a, a)) for _ in range(5))


def cosine(a: list[float], b: list[float]) -> float:
    product: float = sum(map(mul, a, b))
    return product / (math.hypot(*a) * math.hypot(*b))


def compare(geometry: str, forms: list[str], count: int, repeats: int) -> dict[str, Any]:
    """Let the engines take turns; return passages a second, medians, and the least cosines."""
    rows = [
        ("sentence-transformers", "float32"),
        ("sentence-transformers", "bfloat16"),
        *(("octavo", f) for f in forms),
    ]
    runs: dict[str, list[float]] = {" ".join(row): [] for row in rows}
    cosines: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        num_weights = write_model(Path(folder), geometry)
        flops_per_s = float32_rate()
        reference: list[list[float]] = []
        for _ in range(repeats):
            for engine, form in rows:
                result, name = run_in_process(engine, Path(folder), form, count), f"{engine} {form}"
                reference = reference or result["vectors"]
                runs[name].append(result["passages_per_s"])
                cosines[name] = min(map(cosine, result["vectors"], reference))
                print(f"{geometry}: {name}: {runs[name][-1]:.2f} passages/s", file=sys.stderr, flush=True)
    return {
        "geometry": geometry,
        "passages": count,
        "float32_flops_per_s": flops_per_s,
        "bound_passages_per_s": flops_per_s / (2 * num_weights * NUM_WORDS),
        "medians": {name: statistics.median(values) for name, values in runs.items()},
        "least_cosines": cosines,
        "runs": runs,
    }


def table(report: dict[str, Any]) -> str:
    peer = max(value for name, value in report["medians"].items() if not name.startswith("octavo"))
    lines = [
        f"| {report['geometry']} | passages/s | beside the faster peer | least cosine |",
        "| --- | --- | --- | --- |",
    ]
    for name, value in report["medians"].items():
        lines.append(f"| {name} | {value:.2f} | {value / peer:.2f} | {report['least_cosines'][name]:.5f} |")
    return "\n".join([*lines, f"| bound of float32 products | {report['bound_passages_per_s']:.2f} | | |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", nargs="+", choices=GEOMETRIES, default=list(GEOMETRIES))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="of Octavo's weights")
    parser.add_argument("--passages", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the reports as JSON")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        print(json.dumps(run_octavo(args.folder, args.forms[0], args.passages)))
        return
    reports = [compare(geometry, args.forms, args.passages, args.repeats) for geometry in args.geometry]
    print("\n\n".join(map(table, reports)))
    if args.out:
        args.out.write_text(json.dumps(reports, indent=2) + "\n")


if __name__ == "__main__":
    main()
