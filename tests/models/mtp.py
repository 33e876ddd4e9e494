"""Tiny checkpoints with an MTP head, and the head computed from scratch for every draft.

The head's layer and final norm are a model of one layer of transformers', which itself drops such weights of most
families; the rest is a page of torch. From the paper (arXiv:2412.19437, section 2.2): entry p is token p + 1 next to
the model's final state at position p, in this order, each behind a norm of its own.
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny import TinyModel, by_name

_IN_LAYER = {"projection": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}
_APART = {
    "projection": "fc",
    "embedding_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "norm": "norm",
}


@dataclass(frozen=True, slots=True)
class ReferenceMtp:
    """A head, as torch computes it, and transformers' model that it belongs to."""

    target: Any
    layer: Any  # transformers' model: its only layer and its norm are the head's
    parts: dict[str, Any]  # projection, embedding_norm, hidden_norm

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return the greedy drafts after `tokens`, of which the model has computed all but the last."""
        with torch.no_grad():
            context, hidden = tokens[1:], self.states_of(tokens[:-1])
            for _ in range(count):
                output = self.run(context, hidden)[-1:]
                context = [*context, int(self.target.lm_head(output).argmax())]
                hidden = torch.cat((hidden, output))
        return context[len(tokens) - 1 :]

    def states_of(self, tokens: list[int]) -> torch.Tensor:
        """Return what the model's logits head reads, [n, D]."""
        state: torch.Tensor = self.target.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return state

    def run(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Return the head's states [n, D] after its norm, for tokens and the states [n, D] before them."""
        embeddings = self.target.get_input_embeddings()(torch.tensor(tokens))
        both = (self.parts["embedding_norm"](embeddings), self.parts["hidden_norm"](hidden))
        x = self.parts["projection"](torch.cat(both, dim=1))
        output: torch.Tensor = self.layer.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return output

    def learn(self, sequences: list[tuple[list[int], int]], num_steps: int = 12) -> None:
        """Learn to draft these well: each has tokens, and the number of those that are prompt."""
        trained = [*self.layer.model.layers.parameters(), *self.layer.model.norm.parameters()]
        trained += [each for part in self.parts.values() for each in part.parameters()]
        optimizer = torch.optim.Adam(trained, lr=0.04)
        with torch.no_grad():
            batch = [(tokens, self.states_of(tokens[:-2]), num_prompt) for tokens, num_prompt in sequences]
        for _ in range(num_steps):
            losses = []
            for tokens, states, num_prompt in batch:
                first = max(num_prompt - 2, 0)
                logits = self.target.lm_head(self.run(tokens[1:-1], states))
                losses.append(torch.nn.functional.cross_entropy(logits[first:], torch.tensor(tokens[2 + first :])))
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]  # torch has no type for it
            optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the head's tensors under the names of its family."""
        num_layers = self.target.config.num_hidden_layers
        is_apart = "linear_num_key_heads" in self.target.config.to_dict()
        stem, names = ("mtp.", _APART) if is_apart else (f"model.layers.{num_layers}.", _IN_LAYER)
        layer = "mtp.layers.0." if is_apart else stem
        with TemporaryDirectory() as folder:
            self.layer.save_pretrained(folder)
            saved = load_file(Path(folder) / "model.safetensors")
        found = {
            layer + name.removeprefix("model.layers.0."): tensor.clone()
            for name, tensor in saved.items()
            if name.startswith("model.layers.0.")
        }
        weights = {place: part.weight for place, part in self.parts.items()} | {"norm": self.layer.model.norm.weight}
        return found | {f"{stem}{names[place]}.weight": weight.detach().clone() for place, weight in weights.items()}

    def save(self, folder: Path) -> None:
        """Write the model with its head."""
        self.target.save_pretrained(folder)
        add_tensors(folder, self.tensors())


def make_ideal(head: ReferenceMtp, seed: int = 5) -> None:
    """Change weights so that each first draft is right, and is read from the model's state after its final norm alone.

    No layer adds anything, so the state at a token t is its embedding, normalized: in one half, the code of the token
    that follows, which the logits head reads; in the other, that of the one after it, which only the MTP head reads.
    The final norm turns that half around: before it, the same head would draft the least likely token.
    """
    size, vocab_size = head.target.config.hidden_size, head.target.config.vocab_size
    generator, half = torch.Generator().manual_seed(seed), size // 2
    codes = torch.nn.functional.normalize(torch.randn(vocab_size, half, generator=generator))
    follows = torch.randperm(vocab_size, generator=generator)
    turned = torch.cat((torch.ones(half), -torch.ones(half)))
    with torch.no_grad():
        for model in (head.target, head.layer):
            for name, weight in model.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
                    weight.zero_()
        head.target.get_input_embeddings().weight.copy_(torch.cat((codes[follows], codes[follows[follows]]), dim=1))
        head.target.lm_head.weight.copy_(torch.cat((codes, torch.zeros_like(codes)), dim=1))
        for norm, factors in (
            (head.target.model.norm, turned),
            (head.parts["hidden_norm"], torch.ones(size)),
            (head.layer.model.norm, torch.ones(size)),
        ):
            norm.weight.zero_()
            norm.weight.copy_(factors - norm(torch.ones(size)))  # some are stored minus one
        head.parts["projection"].weight.zero_()
        head.parts["projection"].weight[:half, size + half :] = -torch.eye(half)


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add tensors to a checkpoint."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def make_mtp(case: str | TinyModel, seed: int = 3) -> ReferenceMtp:
    """Return a tiny model, perhaps by its name in the table, and a head for it with random weights."""
    case = by_name(case) if isinstance(case, str) else case
    one: dict[str, Any] = {**case.settings, "num_hidden_layers": 1}
    for key, value in (
        ("layer_types", ["full_attention"]),
        ("mlp_layer_types", ["sparse"]),
        ("first_k_dense_replace", 0),
        ("mlp_only_layers", []),
        ("decoder_sparse_step", 1),
    ):
        if key in one:
            one[key] = value
    layer = TinyModel(name=case.name, family=case.family, settings=one).build(seed)
    generator = torch.Generator().manual_seed(seed)
    size, norm = layer.config.hidden_size, layer.model.norm
    norms = {place: type(norm)(size, layer.config.rms_norm_eps) for place in ("embedding_norm", "hidden_norm")}
    projection = torch.nn.Linear(2 * size, size, bias=False)
    with torch.no_grad():
        for each in norms.values():
            each.weight.add_(0.3 * torch.randn(size, generator=generator))
        projection.weight.copy_(0.25 * torch.randn(size, 2 * size, generator=generator))
    return ReferenceMtp(case.build(), layer, {"projection": projection, **norms})
