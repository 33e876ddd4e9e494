"""StableLM: checkpoints hold norms of heads one by one. Legend: H = heads, E = head size."""

import re
from collections.abc import Iterable, Iterator

import torch

from octavo.errors import CheckpointError
from octavo.models.interfaces import CausalLM

_OF_A_HEAD = re.compile(
    r"(?P<attention>model\.layers\.(?P<layer>\d+)\.self_attn)\.(?P<kind>[qk])_layernorm\.norms\.(?P<head>\d+)\.weight"
)


class StableLmForCausalLM(CausalLM):
    """The table of names has the norms of all heads of a kind as one tensor, as GGUF files have them."""

    def laid_out(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each layer's norms of queries, and of keys, as one tensor [H, E]."""
        parts: dict[str, dict[int, torch.Tensor]] = {}
        for name, tensor in tensors:
            found = _OF_A_HEAD.fullmatch(name)
            if found is None:
                yield name, tensor
                continue
            whole = f"{found['attention']}.{found['kind']}_norm.weight"
            heads = parts.setdefault(whole, {})
            heads[int(found["head"])] = tensor
            spec = self.config.attention(int(found["layer"]))
            count = spec.num_heads if found["kind"] == "q" else spec.num_kv_heads
            if len(heads) == count:
                if sorted(heads) != list(range(count)):
                    raise CheckpointError(
                        f"{self.config.path}: tensor {name!r}: norms of heads 0 to {count - 1} are expected"
                    )
                yield whole, torch.stack([heads[head] for head in range(count)])
                del parts[whole]
        for whole, heads in parts.items():
            raise CheckpointError(f"{self.config.path}: tensor {whole!r}: {len(heads)} heads are too few")
