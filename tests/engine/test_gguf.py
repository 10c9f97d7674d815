"""GGUF files are read to the bit; what is not readable is refused by name."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_llama import SHAPE
from transformers import LlamaConfig, LlamaForCausalLM

from tinkex.engine.device.backend import load_decoder
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.model.gguf import GgufFile, unpermute_rope_rows
from tinkex.errors import InvalidInputError, NotSupportedError


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


Stored = tuple[str, int, tuple[int, ...], bytes]
"""Name, type, shape, data."""


def encode_value(value: object) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    assert isinstance(value, list)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def write_file(path: Path, metadata: dict[str, object], tensors: list[Stored]) -> Path:
    meta = b"".join(text(key) + encode_value(value) for key, value in metadata.items())
    info, data = b"", b""
    for name, kind, shape, raw in tensors:
        info += text(name) + struct.pack("<I", len(shape))
        info += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack(
            "<IQ", kind, len(data)
        )
        data += raw + b"\0" * (-len(raw) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + meta + info
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def write_gguf(path: Path, kind: int, shape: tuple[int, ...], data: bytes) -> Path:
    """A file with metadata of several sorts and one tensor `w`."""
    metadata = {"general.architecture": "llama", "numbers": [1, -2, 3], "words": ["a", "b c"]}
    return write_file(path, metadata, [("w", kind, shape, data)])


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


NIBBLES = np.arange(16, dtype=np.uint8) | (np.arange(15, -1, -1, dtype=np.uint8) << 4)
UP_DOWN = np.concatenate([np.arange(16), np.arange(15, -1, -1)]).astype(np.float32)


def test_metadata_keeps_scalars_arrays_and_strings(tmp_path):
    file = GgufFile(write_gguf(tmp_path / "a.gguf", 0, (2,), np.ones(2, np.float32).tobytes()))
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["numbers"] == [1, -2, 3]
    assert file.metadata["words"] == ["a", "b c"]


@pytest.mark.parametrize(
    ("kind", "block", "expected"),
    [
        (2, half(0.5) + NIBBLES.tobytes(), (UP_DOWN - 8) * 0.5),
        (3, half(0.5) + half(-3.0) + NIBBLES.tobytes(), UP_DOWN * 0.5 - 3.0),
        (6, half(0.5) + b"\xff\xff\0\0" + NIBBLES.tobytes(),
         (UP_DOWN + 16 * (np.arange(32) < 16) - 16) * 0.5),
        (7, half(0.5) + half(-3.0) + b"\0\0\xff\xff" + NIBBLES.tobytes(),
         (UP_DOWN + 16 * (np.arange(32) >= 16)) * 0.5 - 3.0),
        (8, half(0.25) + np.arange(-16, 16, dtype=np.int8).tobytes(), np.arange(-16, 16) * 0.25),
    ],
    ids=["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"],
)  # fmt: skip
def test_blocks_of_32_widen_to_their_definition(tmp_path, kind, block, expected):
    values = GgufFile(write_gguf(tmp_path / "a.gguf", kind, (1, 32), block)).read("w")
    np.testing.assert_array_equal(values[0], expected.astype(np.float32))


def test_q6_k_widens_as_the_reference_loop_does(tmp_path):
    rng = np.random.default_rng(0)
    low, high = rng.integers(0, 256, 128, np.uint8), rng.integers(0, 256, 64, np.uint8)
    scales = rng.integers(-128, 128, 16).astype(np.int8)
    block = low.tobytes() + high.tobytes() + scales.tobytes() + half(0.125)
    expected = np.empty(256, np.float32)
    for part in range(2):
        for column in range(32):
            bits = int(high[32 * part + column])
            first, second = int(low[64 * part + column]), int(low[64 * part + 32 + column])
            for row, nibble in enumerate((first & 15, second & 15, first >> 4, second >> 4)):
                quant = (nibble | (((bits >> (2 * row)) & 3) << 4)) - 32
                scale = int(scales[8 * part + 2 * row + column // 16])
                expected[128 * part + 32 * row + column] = 0.125 * scale * quant
    values = GgufFile(write_gguf(tmp_path / "a.gguf", 14, (256,), block)).read("w")
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize(("kind", "raw"), [(0, np.float32), (1, np.float16)], ids=["F32", "F16"])
def test_plain_floats_come_back_in_torch_order(tmp_path, kind, raw):
    data = np.arange(6, dtype=raw).reshape(2, 3)
    values = GgufFile(write_gguf(tmp_path / "a.gguf", kind, (2, 3), data.tobytes())).read("w")
    np.testing.assert_array_equal(values, data.astype(np.float32))


def test_bf16_widens_exactly(tmp_path):
    truth = np.array([1.5, -2.0, 3.140625], np.float32)
    data = (truth.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    values = GgufFile(write_gguf(tmp_path / "a.gguf", 30, (3,), data)).read("w")
    np.testing.assert_array_equal(values, truth)


def test_rope_rows_return_to_their_original_order():
    rows = np.arange(2 * 8, dtype=np.float32).reshape(16, 1)
    permuted = rows.reshape(2, 2, 4, 1).swapaxes(1, 2).reshape(16, 1)  # as llama.cpp writes them
    np.testing.assert_array_equal(unpermute_rope_rows(permuted, 2), rows)


def test_a_format_we_do_not_read_is_refused_by_number(tmp_path):
    file = GgufFile(write_gguf(tmp_path / "a.gguf", 12, (256,), b"\0" * 144))
    with pytest.raises(NotSupportedError, match="GGUF type 12.*Q4_1"):
        file.read("w")


def test_a_cut_or_foreign_file_is_refused(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", 0, (9,), b"\0" * 32)
    with pytest.raises(InvalidInputError, match="ends inside tensor 'w'"):
        GgufFile(path).read("w")
    path.write_bytes(b"PK\x03\x04 no gguf")
    with pytest.raises(InvalidInputError, match="not a GGUF"):
        GgufFile(path)


def as_llama_cpp(tensors, num_heads: int, num_kv_heads: int) -> list[Stored]:
    """Hugging Face weights under llama.cpp's names, q and k rows permuted as its converter does."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers.": "blk.",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
    }
    stored = []
    for name, tensor in tensors.items():
        rows = tensor.numpy()
        if ".q_proj" in name or ".k_proj" in name:
            heads = num_heads if ".q_proj" in name else num_kv_heads
            split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
            rows = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        stored.append((name, 0, rows.shape, rows.astype(np.float32).tobytes()))
    return stored


def test_a_gguf_model_computes_what_its_safetensors_compute(tmp_path):
    """The row permutation of q and k is undone, and the config says the same."""
    config = LlamaConfig(
        **SHAPE, tie_word_embeddings=True, rms_norm_eps=1e-5, initializer_range=0.2
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.eos_token_id": 2,
    }
    weights = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    path = write_file(tmp_path / "tiny.gguf", metadata, as_llama_cpp(weights, 4, 2))
    decoder = load_decoder(str(path))
    tokens = torch.arange(10)
    with torch.no_grad():
        hidden_TD = decoder.forward(tokens, tokens, PackedCausal([0, 10]))
        torch.testing.assert_close(decoder.head(hidden_TD), model(tokens[None]).logits[0])
