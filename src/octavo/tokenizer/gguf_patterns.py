"""How GGUF files name the rules by which text is split before BPE: `tokenizer.ggml.pre`, by llama.cpp's converter."""

from types import MappingProxyType

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN2 = f"{_CONTRACTIONS}|{_WORDS}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DOUBLED = "".join(rf"\s{{{2**power}}}(?!\S)|" for power in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s{1}"
_JAIS2 = _LLAMA3.replace(r"\s+(?!\S)|\s+", _DOUBLED)  # spaces by the hundred are words of their own
_MINICPM5 = _LLAMA3.replace("{1,3}", "+")  # after digits by threes
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
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
_MARKED_WORDS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_THREES, _HAN_AND_KANA = r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3_WORDS = _MARKED_WORDS + r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e00-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_THREES_FROM_THE_END = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|" + _HAN_AND_KANA
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
        "deepseek-v3": (_THREES, _HAN_AND_KANA, _DEEPSEEK3_WORDS),
        "deepseek-coder": _DEEPSEEK_CODER,  # before single digits
        "deepseek-llm": _DEEPSEEK_LLM,  # before single digits
        "kimi-k2": (_KIMI,),
        "minimax-m2": (_O200K,),
        "hunyuan": (_QWEN2,),
        "seed-coder": (_SEED,),
        "bailingmoe": (_BAILING,),
        "exaone-moe": (_EXAONE_MOE,),
        "minicpm5": (_THREES, _MINICPM5),
        "afmoe": (_THREES_FROM_THE_END, _ASIAN, _DEEPSEEK3_WORDS),
        "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", _O200K),
        "youtu": (_YOUTU, _O200K.replace("{1,3}", "")),
        "laguna": (r"[^\n]+|[\n]+", _QWEN2),
        "spark2_5": (_THREES, _HAN_AND_KANA, _MARKED_WORDS + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
        "ufakzeka": (_WORDS,),
        "jais-2": (_JAIS2,),
        "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
        "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
        "bloom": (_BLOOM,),
        "viking": (_BLOOM, r"\p{N}"),
    }
)
_DIGITS_BEFORE, _DIGITS_AFTER = ("smollm",), ("deepseek-coder", "deepseek-llm")
WHOLE_WORDS_FIRST = ("llama-bpe", "tekken", "gpt-4o", "minicpm5", "youtu")  # a word that is a token is not split
COMPOSED = ("qwen2", "qwen35")  # Unicode is normalized to NFC
# What files without `add_bos_token` mean: those of Llama 3 and Mistral do not say it.
BEGINS_WITH_BOS = ("llama-bpe", "tekken")
OTHER_NAMES = MappingProxyType(
    {
        **dict.fromkeys(("llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), "llama-bpe"),
        **dict.fromkeys(("glm4", "chatglm-bpe", "dbrx"), "smaug-bpe"),
        **dict.fromkeys(("deepseek-r1-qwen", "megrez", "f2llmv2"), "qwen2"),
        **dict.fromkeys(("stablelm2", "solar-open", "grok-2", "kormo"), "hunyuan"),
        **dict.fromkeys(("hunyuan-dense", "joyai-llm", "hy_v4"), "deepseek-v3"),
        **dict.fromkeys(("olmo", "phi-2", "exaone4", "granite-docling", "mpt", "jais"), "gpt-2"),
        **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "trillion"), "gpt-2"),
        **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), "smollm"),
        **dict.fromkeys(("llama4", "kanana2", "talkie"), "gpt-4o"),
        **dict.fromkeys(("bailingmoe2", "llada-moe"), "bailingmoe"),
        **dict.fromkeys(("poro-chat", "gpt3-finnish"), "bloom"),
        "cohere2moe": "tiny_aya",
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
