"""Models that transformers' own code computes in Octavo, beside that code in transformers' `generate`.

    python -m benchmarks.offline.fallback [--models gpt2 ...] [--dtypes float32 bfloat16] [--repeats 1] [--out FILE]

Random weights of real geometries, greedy, 32 tokens out; a single prompt of 32 tokens, then 32 prompts of 16 to 47,
which transformers has padded on the left and Octavo as they are. The time is of a whole `generate`, prompts included,
after one of the same size. Each engine runs in a process of its own and they take turns; the table shows medians.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.geometry import write_checkpoint

NUM_OUT, BATCHES = 32, (1, 32)
ENGINES = ("octavo", "transformers")
_SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257, **_SPECIAL},
    "opt-125m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 768,
        **_SPECIAL,
    },
    "pythia-160m": {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": 50304,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
        **_SPECIAL,
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        **_SPECIAL,
    },
}


def prompts_of(batch: int) -> list[list[int]]:
    """Return 32 tokens, or prompts of 16 to 47."""
    source = random.Random(batch)
    lengths = [32] if batch == 1 else [16 + source.randrange(32) for _ in range(batch)]
    return [[source.randrange(1, 49000) for _ in range(length)] for length in lengths]


def octavo(folder: Path, dtype: str) -> Callable[[list[list[int]]], None]:
    """Return what generates by the library's code in Octavo."""
    from octavo import LLM, SamplingParams
    from octavo.inputs import Prompt

    options: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 32, "enable_prefix_caching": False}
    llm = LLM(str(folder), load_format="dummy", dtype=dtype, model_impl="transformers", **options)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUT, ignore_eos=True)

    def generate(prompts: list[list[int]]) -> None:
        inputs: list[Prompt] = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(inputs, params, use_tqdm=False)

    return generate


def transformers(folder: Path, dtype: str) -> Callable[[list[list[int]]], None]:
    """The same with transformers' `generate`, as it is by default."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]]) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_OUT, min_new_tokens=NUM_OUT)

    return generate


def measure(engine: str, folder: Path, dtype: str) -> dict[str, float]:
    """Return the tokens per second of each batch size."""
    generate = (octavo if engine == "octavo" else transformers)(folder, dtype)
    results = {}
    for batch in BATCHES:
        prompts = prompts_of(batch)
        generate(prompts)
        begun_s = time.perf_counter()
        generate(prompts)
        results[f"{batch}"] = batch * NUM_OUT / (time.perf_counter() - begun_s)
    return results


def compare(models: list[str], dtypes: list[str], repeats: int) -> dict[str, Any]:
    """Let the engines take turns on every model in every dtype; return all runs and their medians."""
    rows = []
    for name in models:
        with tempfile.TemporaryDirectory() as parent:
            folder = write_checkpoint(Path(parent) / name, MODELS[name])
            for dtype in dtypes:
                runs: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
                for _ in range(repeats):
                    for engine in ENGINES:
                        command = [sys.executable, "-m", "benchmarks.offline.fallback", "--engine", engine]
                        command += ["--folder", str(folder), "--dtypes", dtype]
                        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                        runs[engine].append(json.loads(done.stdout.splitlines()[-1]))
                medians = {
                    engine: {cell: statistics.median(run[cell] for run in found) for cell in found[0]}
                    for engine, found in runs.items()
                }
                rows.append({"model": name, "dtype": dtype, "medians": medians, "runs": runs})
                print(*table(rows[-1]), sep="\n", flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "command": " ".join(["python -m benchmarks.offline.fallback", *sys.argv[1:]]),
        "commit": commit,
        "rows": rows,
    }


def table(row: dict[str, Any]) -> list[str]:
    """Return a line of the table for each batch size."""
    ours, theirs = (row["medians"][engine] for engine in ENGINES)
    cells = ((name, ours[name], theirs[name]) for name in ours)
    name = f"{row['model']} | {row['dtype']}"
    return [f"| {name} | {cell} | {our:.1f} | {their:.1f} | {our / their:.2f} |" for cell, our, their in cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print(json.dumps(measure(args.engine, args.folder, args.dtypes[0])))
        return
    print(
        "| model | dtype | requests | Octavo tok/s | transformers tok/s | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
        sep="\n",
    )
    report = compare(args.models, args.dtypes, args.repeats)
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
