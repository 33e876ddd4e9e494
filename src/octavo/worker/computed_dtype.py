"""Settles the dtype that a rank computes in, where the checkpoint's has no kernels on this device."""

import logging
from dataclasses import replace
from typing import cast

from octavo.config.engine import EngineConfig
from octavo.config.model import DType
from octavo.config.parallel import RankPlace
from octavo.device.manager import DeviceManager

logger = logging.getLogger(__name__)


def with_computed_dtype(config: EngineConfig, devices: DeviceManager, place: RankPlace) -> EngineConfig:
    """Return `config` with the dtype in which its models are computed on this device; the first rank logs a change.

    It is known only here: to know the device takes torch.

    Raises:
        InvalidParameterError: the device does not support the dtype.
    """
    stated, draft = config.model.dtype, config.draft_model
    is_quantized = config.model.quantization is not None or config.quantization is not None
    asked = "auto" if config.is_dtype_auto else stated
    resolved = devices.resolve_dtype(asked, stated, is_quantized=is_quantized)
    dtype = cast(DType, str(resolved).removeprefix("torch."))
    if place.rank == 0 and devices.is_slow(stated, is_quantized=is_quantized):
        _log(config.model.model, stated, dtype)
    if dtype == stated:
        return config
    if draft is not None:
        draft = replace(draft, model=replace(draft.model, dtype=dtype))
    return replace(config, model=replace(config.model, dtype=dtype), draft_model=draft)


def _log(model: str, stated: str, dtype: str) -> None:
    if dtype == stated:
        logger.warning(
            "dtype=%s: this CPU has no kernels for it, so torch's reference ops compute, at a small fraction of "
            "bfloat16's speed, and bits may depend on the batch",
            dtype,
        )
    else:
        logger.warning(
            "%s is stored in %s, for which this CPU has no kernels: computing in %s; dtype=%s would compute slowly",
            model, stated, dtype, stated,
        )  # fmt: skip
