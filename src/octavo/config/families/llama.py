"""Llama 1 to 3.x (Touvron et al. 2023, arXiv:2302.13971): the decoder without changes."""

from octavo.config.family import Family, GgufFacts

FAMILIES = (
    Family(
        name="LlamaForCausalLM",
        model_type="llama",
        has_mlp_bias_key=True,
        gguf=GgufFacts(
            architecture="llama",
            fits=lambda keys: not (keys.values.get("expert_count") or keys.values.get("attention.sliding_window")),
            interleaves_rows=True,
            is_written=True,
        ),
    ),
)
