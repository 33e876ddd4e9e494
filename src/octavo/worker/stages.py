"""How a model's layers are divided into the stages of a pipeline."""

from functools import cache
from itertools import accumulate

from octavo.config.model import ModelConfig
from octavo.config.parallel import RankPlace, Stage
from octavo.worker.parameters import empty_model, num_weights


def stage_of(model: ModelConfig, place: RankPlace) -> Stage:
    """Return the stage that a rank holds."""
    return plan_stages(model, place.pp_size)[place.pp_rank]


def plan_stages(model: ModelConfig, num_stages: int) -> list[Stage]:
    """Divide the layers so that the largest stage has as few weights as can be, each at least one layer.

    The embedding counts for the first stage and the logits head for the last, tied or not: then both hold the table.
    """
    assert 1 <= num_stages <= model.num_layers, f"{num_stages} stages for {model.num_layers} layers"
    if num_stages == 1:
        return [Stage.whole(model.num_layers)]
    built = empty_model(model)
    layers = [num_weights(built.get_submodule(f"layers.{layer}")) for layer in range(model.num_layers)]
    before, vocabulary = [0, *accumulate(layers)], num_weights(built.get_submodule("embedding"))

    @cache
    def best(first: int, num_left: int) -> tuple[int, tuple[int, ...]]:
        """Return the weights of the largest of `num_left` stages from layer `first` on, and where each of them ends."""
        start = before[first] - vocabulary * (first == 0)
        if num_left == 1:
            return before[-1] + vocabulary - start, (model.num_layers,)
        plans = []
        for end in range(first + 1, model.num_layers - num_left + 2):
            largest, ends = best(end, num_left - 1)
            plans.append((max(before[end] - start, largest), (end, *ends)))
        return min(plans)

    ends = best(0, num_stages)[1]
    return [
        Stage(first_layer=first, end_layer=end, is_first=first == 0, is_last=end == model.num_layers)
        for first, end in zip((0, *ends), ends, strict=False)
    ]
