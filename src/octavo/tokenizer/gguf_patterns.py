"""How GGUF files name the rules by which text is split before BPE: `tokenizer.ggml.pre`, by llama.cpp's converter."""

from types import MappingProxyType

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _cased_words(upper: str, lower: str) -> str:
    """Return the words of o200k: letters of one case, or a capital and small ones, with what English contracts."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}[{upper}]*[{lower}]+{_CONTRACTIONS}?|{before}[{upper}]+[{lower}]*{_CONTRACTIONS}?"


_O200K = _cased_words(_UPPER, _LOWER) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_NO_HAN = r"&&[^\p{Han}]"  # Chinese characters are words of their own
_KIMI = r"[\p{Han}]+|" + _cased_words(_UPPER + _NO_HAN, _LOWER + _NO_HAN) + r"|\p{N}{1,3}|" + _REST
# Marks count with letters.
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK)
_DEEPSEEK_LLM = (
    "[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
)
# By name: the patterns by which text is split, each of what the one before left; (): the library's own.
PATTERNS = MappingProxyType(
    {
        "gpt-2": (),
        "smollm": (),  # after single digits
        "llama-bpe": (_LLAMA3,),
        "smaug-bpe": (_LLAMA3,),
        "qwen2": (_QWEN2,),
        "qwen35": (_QWEN35,),
        "tekken": (_TEKKEN,),
        "gpt-4o": (_O200K,),
        "deepseek-v3": _DEEPSEEK3,
        "deepseek-coder": _DEEPSEEK_CODER,  # before single digits
        "deepseek-llm": _DEEPSEEK_LLM,  # before single digits
        "kimi-k2": (_KIMI,),
        "minimax-m2": (_O200K,),
        "hunyuan": (_QWEN2,),
        "seed-coder": (_SEED,),
    }
)
_DIGITS_BEFORE, _DIGITS_AFTER = ("smollm",), ("deepseek-coder", "deepseek-llm")
WHOLE_WORDS_FIRST = ("llama-bpe", "tekken", "gpt-4o")  # a word that is a token is not split
COMPOSED = ("qwen2", "qwen35")  # Unicode is normalized to NFC
# What files without `add_bos_token` mean: those of Llama 3 and Mistral do not say it.
BEGINS_WITH_BOS = ("llama-bpe", "tekken")
OTHER_NAMES = MappingProxyType(
    {
        **dict.fromkeys(("llama3", "llama-v3", "lfm2"), "llama-bpe"),
        **dict.fromkeys(("glm4", "chatglm-bpe", "dbrx"), "smaug-bpe"),
        **dict.fromkeys(("deepseek-r1-qwen", "megrez"), "qwen2"),
        **dict.fromkeys(("stablelm2", "solar-open", "grok-2"), "hunyuan"),
        **dict.fromkeys(("hunyuan-dense", "joyai-llm"), "deepseek-v3"),
        **dict.fromkeys(("olmo", "phi-2", "exaone4", "granite-docling", "mpt", "jais"), "gpt-2"),
        **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), "smollm"),
        "llama4": "gpt-4o",
    }
)


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Return the rules of this name, the first of its kind."""
    patterns = PATTERNS[name]
    digits = pre_tokenizers.Digits(individual_digits=True)
    parts: list[pre_tokenizers.PreTokenizer] = [digits] * (name in _DIGITS_BEFORE)
    parts += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    parts += [digits] * (name in _DIGITS_AFTER)
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    return pre_tokenizers.Sequence([*parts, of_bytes]) if parts else of_bytes
