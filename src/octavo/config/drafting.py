"""Finds the draft model or EAGLE-3 head of `speculative_config`."""

from octavo.config.draft_model import resolve_draft_model
from octavo.config.eagle import resolve_eagle_head
from octavo.config.model import ModelConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.speculative import DraftModelConfig, SpeculativeConfig
from octavo.errors import InvalidParameterError


def resolve_drafting(
    options: SpeculativeConfig | None, model: ModelConfig, parallel: ParallelConfig, *, with_weights: bool
) -> DraftModelConfig | None:
    """Return the configuration of the model or head that drafts in the ranks; None if none does.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: about the draft model or head.
        InvalidParameterError: it does not fit the model, or the degrees of parallelism.
    """
    if options is None or options.model is None:
        return None
    num_stages = parallel.pipeline_parallel_size
    if options.method == "eagle3":
        if num_stages > 1:
            limit = "1 with method eagle3: a head reads hidden states of several stages"
            raise InvalidParameterError("pipeline_parallel_size", num_stages, limit)
        return resolve_eagle_head(options, model, with_weights=with_weights)
    if parallel.distributed_executor_backend == "ray" and num_stages > 1:
        limit = "1 with a draft model on Ray: stages on different processors would draft different tokens"
        raise InvalidParameterError("pipeline_parallel_size", num_stages, limit)
    return resolve_draft_model(options, model, with_weights=with_weights)
