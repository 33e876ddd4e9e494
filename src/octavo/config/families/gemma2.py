"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118): norms around branches, windows in every other layer, capped scores."""

from octavo.config.families.gemma3 import FAMILIES as GEMMA3
from octavo.config.family import DECODER_NAMES, SANDWICH_NORM_NAMES, Family, GgufFacts

_NORMS = GEMMA3[0].gguf
assert _NORMS is not None, "Gemma 3 has GGUF files"
FAMILIES = (
    Family(
        name="Gemma2ForCausalLM",
        model_type="gemma2",
        weight_names={**DECODER_NAMES, **SANDWICH_NORM_NAMES},
        num_kv_heads=4,
        head_dim=256,
        window_rule="pattern",
        norms="around",
        norm_offset=1.0,
        activation="gelu_tanh",
        has_attention_scale_key=True,
        has_score_cap_key=True,
        scales_embedding=True,
        defaults={
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "tie_word_embeddings": True,
        },
        gguf=GgufFacts(
            architecture="gemma2",
            names=_NORMS.names,
            settings=lambda keys, so_far: {
                "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
                "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
                # Not in files: the head size, but for the 27B model.
                "query_pre_attn_scalar": keys.integer("embedding_length") // keys.integer("attention.head_count")
                if keys.integer("block_count") == 46
                else keys.integer("attention.key_length", 256),
            },
        ),
    ),
)
