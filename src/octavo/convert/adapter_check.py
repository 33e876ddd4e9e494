"""Checks an adapter against a model without the model's memory: every tensor's name, shape and rank."""

from pathlib import Path

import torch

from octavo.config.engine import LoadConfig, LoadFormat
from octavo.config.model import ModelConfig
from octavo.lora.adapter_config import read_adapter_config
from octavo.lora.base_weights import BaseWeights
from octavo.lora.read import AdapterReader
from octavo.lora.targets import AdapterTargets
from octavo.worker.parameters import empty_model


def check_adapter(config: ModelConfig, folder: Path, load_format: LoadFormat = "auto") -> None:
    """Read the adapter in a folder as a rank with the whole model would.

    Raises:
        AdapterError, CheckpointError: names the setting or the tensor that does not fit.
    """
    model = empty_model(config)
    base = BaseWeights(model, LoadConfig(load_format=load_format, seed=0))
    AdapterReader(
        AdapterTargets(model, experts=True), base, read_adapter_config(folder).largest_rank, torch.float32
    ).read(folder)
