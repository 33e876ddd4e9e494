"""A vision tower beside transformers' on the same weights, and beside the roofline of this machine.

    python -m benchmarks.kernels.vision [--dtype float32 bfloat16] [--images 448x448 1344x896] [--threads 2]
        [--layers 4] [--profile] [--out results.json]

The tower has the geometry of Qwen2.5-VL-3B's, with few of its 32 layers, of which the last sees the whole image and the
others windows. Both take turns; times are medians. The roofline is the operations of all linears and of attention over
the matmul rate measured in the same run, in the dtype or in float32, whichever is faster.
`--profile` lists where our time goes.

Legend: P = patches of the image.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from benchmarks.kernels.roofline import matmul_rate
from octavo.attention.selector import select_attention
from octavo.config.engine import LoadConfig
from octavo.config.hf import read_model_config
from octavo.config.model import VisionConfig
from octavo.kernels.dispatch import select_kernels
from octavo.layers.context import BuildContext
from octavo.loader.registry import get_model_loader
from octavo.models.vision import Grid, PatchLayout, VisionLanguageModel, VisionTower

CPU = torch.device("cpu")
IMAGES = ("448x448", "1344x896")  # width and height in pixels
VISION = {
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "patch_size": 14,
    "window_size": 112,
}
TEXT = {
    "vocab_size": 512,
    "hidden_size": 2048,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]},
}
TOKENS = {name: 500 + at for at, name in enumerate(("image", "video", "vision_start", "vision_end"))}


def save_model(folder: Path, num_layers: int) -> Any:
    """Save a checkpoint with random weights and return transformers' tower of it."""
    config = Qwen2_5_VLConfig(
        text_config=TEXT,
        vision_config={**VISION, "depth": num_layers, "fullatt_block_indexes": [num_layers - 1]},
        **{f"{name}_token_id": value for name, value in TOKENS.items()},
    )
    model: Any = Qwen2_5_VLForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    return model.model.visual


def load_tower(folder: Path, dtype: torch.dtype) -> VisionTower:
    """Load ours."""
    name = str(dtype).removeprefix("torch.")
    context = BuildContext(
        kernels=select_kernels(CPU, dtype), attention=select_attention(CPU, dtype), dtype=dtype, device=CPU
    )
    config = read_model_config(folder, model=str(folder), dtype=name)
    model = get_model_loader(LoadConfig(load_format="auto", seed=0)).load_model(config, context)
    assert isinstance(model, VisionLanguageModel)
    assert model.encoder is not None
    return model.encoder


def num_operations(config: VisionConfig, grid: Grid) -> int:
    """Return the operations of linears and attention on an image."""
    layout = PatchLayout.of(grid, config)
    patches, size, inner = len(layout.rows), config.hidden_size, config.intermediate_size
    linears = config.num_layers * (4 * size * size + 3 * size * inner) + config.patch_values * size
    merged = size * config.merge_unit
    merger = merged * (merged + config.out_hidden_size) // config.merge_unit
    segments = [
        layout.frames if number in config.full_layers else layout.windows for number in range(config.num_layers)
    ]
    attended = sum(length * length for lengths in segments for length in lengths)
    return 2 * patches * (linears + merger) + 4 * attended * size


def medians(runs: dict[str, Callable[[], object]], budget_s: float) -> dict[str, float]:
    """Return the median seconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    deadline = time.perf_counter() + budget_s
    while time.perf_counter() < deadline or len(next(iter(times.values()))) < 3:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(of_run) for name, of_run in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each line of the table")
    parser.add_argument("--images", nargs="+", default=IMAGES, help="WIDTHxHEIGHT in pixels")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        theirs = save_model(Path(folder), options.layers)
        print(f"{'image':>12} {'dtype':>9} {'ours':>9} {'theirs':>9} {'faster':>7} {'of roof':>8}  difference")
        found = [
            line
            for name in options.dtype
            for line in compare(load_tower(Path(folder), getattr(torch, name)), theirs, options)
        ]
    if options.out:
        options.out.write_text(
            json.dumps({"threads": options.threads, "layers": options.layers, "lines": found}, indent=2)
        )


def compare(ours: VisionTower, theirs: Any, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Print and yield a line for each image."""
    dtype = ours.context.dtype
    theirs.to(dtype)
    rate = max(matmul_rate(dtype), matmul_rate(torch.float32))
    for image in options.images:
        width, height = map(int, image.split("x"))
        grid = (1, height // ours.config.patch_size, width // ours.config.patch_size)
        patches = torch.randn(grid[1] * grid[2], ours.config.patch_values).to(dtype)
        grids = torch.tensor([grid])
        run = partial(ours, patches, [grid])
        times = medians({"ours": run, "theirs": lambda: theirs(patches, grids)}, options.seconds)  # noqa: B023 - called within this round
        [mine], other = run(), theirs(patches, grids).pooler_output
        difference = (mine.float() - other.float()).abs().max() / other.float().abs().max()
        reached = num_operations(ours.config, grid) / rate / times["ours"]
        yield {
            "image": image,
            "dtype": str(dtype).removeprefix("torch."),
            "ours_s": times["ours"],
            "theirs_s": times["theirs"],
            "of_roof": reached,
            "matmul_flops": rate,
            "difference": float(difference),
        }
        print(
            f"{width:>6} x {height:<4}{str(dtype).removeprefix('torch.'):>9} {times['ours'] * 1e3:6.0f} ms"
            f" {times['theirs'] * 1e3:6.0f} ms {times['theirs'] / times['ours']:6.2f}x"
            f" {reached:7.0%}  {difference:.1e}",
            flush=True,
        )
        if options.profile:
            print_profile(run)


def print_profile(run: Callable[[], object]) -> None:
    with profile() as profiler:
        run()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=50))


if __name__ == "__main__":
    main()
