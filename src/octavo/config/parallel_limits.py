"""Checks of degrees of parallelism against a model."""

import logging

from octavo.config.model import ModelConfig
from octavo.config.parallel import ParallelConfig
from octavo.errors import InvalidParameterError

logger = logging.getLogger(__name__)


def check_parallel(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Check that every rank gets a part of the model.

    Raises:
        InvalidParameterError: more ranks than heads, more stages than layers, or expert parallelism without experts.
    """
    if parallel.tensor_parallel_size > model.num_heads:
        limit = f"at most {model.num_heads}: every rank needs an attention head"
        raise InvalidParameterError("tensor_parallel_size", parallel.tensor_parallel_size, limit)
    if parallel.pipeline_parallel_size > model.num_layers:
        limit = f"at most {model.num_layers}: every stage needs a layer"
        raise InvalidParameterError("pipeline_parallel_size", parallel.pipeline_parallel_size, limit)
    if parallel.enable_expert_parallel and model.moe is None:
        limit = f"requires a MoE model; {model.model} ({model.architecture}) has no experts"
        raise InvalidParameterError("enable_expert_parallel", True, limit)
    if parallel.enable_expert_parallel and parallel.tensor_parallel_size == 1:
        logger.warning("enable_expert_parallel has no effect with tensor_parallel_size=1: one rank has all experts")
