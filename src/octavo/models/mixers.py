"""What mixes the tokens of a layer, as its spec says: attention of either kind, or what keeps a state."""

from torch import nn

from octavo.config.layers import AttentionSpec, GatedDeltaSpec, Mamba2Spec, Mixer, ShortConvSpec
from octavo.config.model import ModelConfig
from octavo.layers.context import BuildContext
from octavo.layers.gated_delta import GatedDeltaMixer
from octavo.layers.mamba2 import Mamba2Mixer
from octavo.layers.short_conv import ShortConvMixer
from octavo.models.common import DecoderAttention
from octavo.models.latent import LatentAttention


def build_mixer(config: ModelConfig, layer: int, context: BuildContext) -> nn.Module:
    """Build the mixer of a layer."""
    mixer = config.layers[layer].mixer
    assert mixer is not None, f"layer {layer} mixes nothing"
    if isinstance(mixer, AttentionSpec):
        return (DecoderAttention if mixer.latent is None else LatentAttention)(config, layer, context)
    is_last = layer == config.num_layers - 1
    return build_state_mixer(config, mixer, context.at(f"layers.{layer}.attention"), is_last=is_last)


def build_state_mixer(config: ModelConfig, mixer: Mixer, context: BuildContext, *, is_last: bool) -> nn.Module:
    """Build what keeps a state; `is_last`: only rows that are kept behind the last layer are left."""
    size, eps, kv_group = config.hidden_size, config.rms_norm_eps, config.kv_group_of_mixer(mixer)
    if isinstance(mixer, ShortConvSpec):
        return ShortConvMixer(mixer, size, kv_group=kv_group, is_last=is_last, context=context)
    if isinstance(mixer, Mamba2Spec):
        return Mamba2Mixer(mixer, size, eps, kv_group=kv_group, is_last=is_last, context=context)
    assert isinstance(mixer, GatedDeltaSpec), "other mixers attend"
    return GatedDeltaMixer(mixer, size, eps, kv_group=kv_group, is_last=is_last, context=context)
