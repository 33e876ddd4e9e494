"""GGUF files of encoders, as llama.cpp's converter writes them: the same vectors as the folder's, and its tokens."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file
from tests.end_to_end.encoders import prompts, save, save_modules
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from octavo import LLM
from octavo.tokenizer.tokenizer import Tokenizer as OwnTokenizer

_ARCHITECTURES = {"Bert": "bert", "NomicBert": "nomic-bert", "Gemma3Text": "gemma-embedding"}
_POOLING = {"Bert": 2, "NomicBert": 1, "Gemma3Text": 1}  # cls, mean
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "##c", "##a", "hello", *(f"x{number}" for number in range(88)))


def convert(name: str, folder: Path, path: Path, dense: list[Any] | None = None) -> Path:
    """Write the checkpoint of a folder under ggml's names."""
    architecture = _ARCHITECTURES[name]
    config = json.loads((folder / "config.json").read_text())
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_pooling_type(gguf.PoolingType(_POOLING[name]))
    if name == "Gemma3Text":
        rope = config["rope_parameters"]
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    else:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_causal_attention(False)
    if name == "NomicBert":
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for tensor_name, tensor in load_file(folder / "model.safetensors").items():
        found = names.get_name(tensor_name, try_suffixes=(".weight", ".bias"))
        if found is None or "pooler" in tensor_name:
            assert tensor_name.startswith("pooler."), tensor_name
            continue
        values = tensor.numpy()
        if name == "Gemma3Text" and found.endswith("norm.weight"):
            values = values + np.float32(1)
        writer.add_tensor(found, values)
    for number, linear in enumerate(dense or (), 2):
        writer.add_tensor(f"dense_{number}.weight", linear.weight.detach().numpy())
    writer.add_tokenizer_model("bert")
    writer.add_token_list([_spelt(word) for word in WORDS])
    writer.add_token_types([3 if word.startswith("[") else 1 for word in WORDS])
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_unk_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _spelt(word: str) -> str:
    if word.startswith("["):
        return word
    return word.removeprefix("##") if word.startswith("##") else f"\N{LOWER ONE EIGHTH BLOCK}{word}"


@pytest.mark.parametrize("name", _ARCHITECTURES)
def test_vectors_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    save(name, folder)
    dense = (60, 48) if name == "Gemma3Text" else ()
    pooling = {1: "mean", 2: "cls"}[_POOLING[name]]
    linears = save_modules(folder, 48, pooling, is_new=True, normalizes=True, dense=dense)
    given = prompts((3, 40))
    with LLM(str(folder), dtype="float32", packed_cache_gib=0.0) as llm:
        expected = [output.embedding for output in llm.embed(given, use_tqdm=False)]  # type: ignore[arg-type]
    with LLM(str(convert(name, folder, tmp_path / "model.gguf", linears)), dtype="float32") as llm:
        found = [output.embedding for output in llm.embed(given, use_tqdm=False)]  # type: ignore[arg-type]
        assert found == expected
        if name == "Bert":
            assert llm.get_tokenizer().encode("Hello ac\xe1") == [2, 8, 4, 6, 7, 3]


def test_tokens_are_those_of_bert(tmp_path: Path) -> None:
    save("Bert", tmp_path / "folder")
    own = Tokenizer(models.WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    own.normalizer, own.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    own.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    path = convert("Bert", tmp_path / "folder", tmp_path / "model.gguf")
    with LLM(str(path), dtype="float32") as llm:
        tokenizer = llm.get_tokenizer()
        for text in ("a b", "bca, HELLO", "zz x9"):
            assert tokenizer.encode(text) == own.encode(text).ids


def test_tokens_are_those_of_xlm_roberta(tmp_path: Path) -> None:
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    pieces = {
        "<s>": 0.0,
        "<pad>": 0.0,
        "</s>": 0.0,
        "<unk>": 0.0,
        space: -2.0,
        f"{space}he": -3.0,
        "llo": -3.5,
        "a": -4.0,
    }
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "bert")
    writer.add_tokenizer_model("t5")
    writer.add_token_list(list(pieces))
    writer.add_token_scores(list(pieces.values()))
    writer.add_token_types([3, 3, 3, 2, 1, 1, 1, 1])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = OwnTokenizer.from_path(tmp_path / "model.gguf")
    assert found.encode("hello  a") == [0, 5, 6, 4, 7, 2]
    assert found.encode_pair("a", "hello", (None, 99)) == ([0, 4, 7, 2, 2, 5, 6, 2], 8)
    assert found.encode_cut("hello hello", 4) == [0, 5, 6, 2]
