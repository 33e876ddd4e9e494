"""Seed-OSS (ByteDance 2025): Llama with biases on queries, keys and values."""

from octavo.config.family import Family, GgufFacts

FAMILIES = (
    Family(
        name="SeedOssForCausalLM",
        model_type="seed_oss",
        num_kv_heads=8,
        head_dim=128,
        out_bias_key="attention_out_bias",
        has_mlp_bias_key=True,
        defaults={"attention_bias": True},
        # Files call the second norm of a block by what is before it.
        gguf=GgufFacts(architecture="seed_oss", names={"post_attention_norm": "post_attention_layernorm"}),
    ),
)
