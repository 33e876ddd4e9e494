"""The progress bar of offline batches: finished prompts, input and output tokens per second, and images."""

import time

from tqdm import tqdm


class ProgressBar:
    """Silent unless `enabled`."""

    def __init__(self, num_prompts: int, *, enabled: bool) -> None:
        self._bar = tqdm(total=num_prompts, desc="Prompts", unit="prompt", disable=not enabled, dynamic_ncols=True)
        self._start_s = time.perf_counter()
        self._num_in = self._num_out = self._num_images = 0

    def finish_one(self, num_prompt_tokens: int, num_output_tokens: int, num_images: int) -> None:
        """Count a finished prompt."""
        self._num_in += num_prompt_tokens
        self._num_out += num_output_tokens
        self._num_images += num_images
        elapsed_s = max(time.perf_counter() - self._start_s, 1e-9)
        rates = f"in {self._num_in / elapsed_s:.0f} tok/s, out {self._num_out / elapsed_s:.0f} tok/s"
        if self._num_images:
            rates += f", {self._num_images / elapsed_s:.1f} images/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it is; nothing more is drawn."""
        self._bar.close()
