"""`PoolingRules`: which vectors a model makes, by its files, and which of them a request may ask for."""

from dataclasses import replace

from octavo.config.model import ModelConfig, PoolingKind
from octavo.contracts.engine import PoolingTask
from octavo.errors import InvalidParameterError
from octavo.sampling_params import PoolingParams


class PoolingRules:
    """Of one model."""

    def __init__(self, model: ModelConfig) -> None:
        self._model, self._config = model, model.pooling
        self.prompt = model.pooling.prompt  # put before each text

    @property
    def makes_vectors(self) -> bool:
        """Whether texts become vectors; else pairs of texts get scores."""
        return not (self._config.ranks or self._config.num_scores)

    def check_dimensions(self, dimensions: int | None) -> None:
        """Refuse a size that the model was not trained for. Raises InvalidParameterError."""
        allowed, size = self._config.dimensions, self._model.vector_size
        if dimensions is None or dimensions == size:
            return
        if dimensions > size:
            raise InvalidParameterError("dimensions", dimensions, f"at most {size}, the size of this model's vectors")
        if allowed is None:
            limit = f"{size}, the size of this model's vectors: nothing in its files says that they may be shortened"
            raise InvalidParameterError("dimensions", dimensions, limit)
        if allowed and dimensions not in allowed:
            known = ", ".join(map(str, sorted({*allowed, size})))
            raise InvalidParameterError("dimensions", dimensions, f"one of {known}, which this model was trained for")

    def resolve(self, params: PoolingParams) -> tuple[PoolingParams, PoolingTask]:
        """Return the parameters with what they leave to the model's files, and what the core does.

        Raises InvalidParameterError: names the field, its value and the limit.
        """
        config, labels = self._config, params.label_token_ids
        if labels is not None:
            if not self._model.has_head:
                raise InvalidParameterError("label_token_ids", labels, "this model predicts no tokens")
            return replace(params, normalize=False, dimensions=None), PoolingTask(kind="labels", token_ids=list(labels))
        if config.num_scores:
            if params.pooling not in (None, config.kind):
                raise InvalidParameterError("pooling", params.pooling, f"{config.kind}, which its classifier reads")
            return replace(params, normalize=False, dimensions=None), PoolingTask(kind=config.kind)
        if config.is_stated or (params.dimensions or 0) > self._model.vector_size:
            self.check_dimensions(params.dimensions)
        normalizes = config.normalizes if params.normalize is None else params.normalize
        kind: PoolingKind = config.kind
        if params.pooling is not None:  # one of these: it checks itself
            kind = "last" if params.pooling == "last" else "mean" if params.pooling == "mean" else "cls"
        return replace(params, normalize=normalizes), PoolingTask(kind=kind)
