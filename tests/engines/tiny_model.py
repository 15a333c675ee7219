"""A model small enough for any test, made on the spot: a Llama of two layers whose weights nobody trained.

What it says is noise. Its tokenizer knows the 256 bytes and three marks, so that every prompt has a length one can count on.
"""

from __future__ import annotations

import json
from pathlib import Path

MARKS = ("<s>", "</s>", "<pad>")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def write_tiny_model(folder: Path, context: int = 4096) -> Path:
    """The files that vLLM wants of a model, but for the weights: `--load-format dummy` makes them up."""
    vocabulary = {name: number for number, name in enumerate([*MARKS, *_byte_letters()])}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": len(vocabulary),
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": context,
        "chat_template": TEMPLATE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in {
        "config.json": config,
        "tokenizer.json": _tokenizer(vocabulary),
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
    }.items():
        (folder / name).write_text(json.dumps(document))
    return folder


def _tokenizer(vocabulary: dict[str, int]) -> dict[str, object]:
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    mark = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": n, "content": name, **mark} for n, name in enumerate(MARKS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level BPE: itself where it can be printed, else one from 256 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    out, beyond = [], 256
    for byte in range(256):
        out.append(chr(byte) if byte in plain else chr(beyond))
        beyond += byte not in plain
    return out
