"""Nemotron 3 and 4, and Minitron (NVIDIA 2024, arXiv:2402.16819): layer norms, MLPs of squared ReLU without a gate."""

from octavo.config.family import DECODER_NAMES, Family

FAMILIES = (
    Family(
        name="NemotronForCausalLM",
        model_type="nemotron",
        weight_names={
            **{name: place for name, place in DECODER_NAMES.items() if ".mlp." not in name},
            "model.layers.{layer}.mlp.up_proj": "layers.{layer}.mlp.up",
            "model.layers.{layer}.mlp.down_proj": "layers.{layer}.mlp.down",
        },
        has_mlp_bias_key=True,
        rms_norm_eps=1e-5,
        usual_keys={"norm_eps": "rms_norm_eps"},
        norm_kind="centered_with_bias",
        norm_offset=1.0,
        activation="relu2",
        has_partial_rotary=True,
        defaults={"partial_rotary_factor": 0.5},
    ),
)
