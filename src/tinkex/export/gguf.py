"""Write a Hugging Face model folder as one GGUF file, which llama.cpp and its kin run.

llama.cpp's own `gguf` package writes the bytes, names the tensors and quantizes. This module knows
what differs between the two layouts: the order of q and k rows, which metadata a native family
needs, and what of a config such a file cannot say. Anything it cannot carry over exactly is refused
with what to do instead; the tokenizer is the business of `gguf_tokens.py`.

Shapes: D model width, H heads, R rows of a projection, C columns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.export.gguf_tokens import add_tokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tinkex.engine.model.shape import ModelConfig

__all__ = ["NumberType", "WrittenFile", "write_gguf"]

NumberType = Literal["f32", "f16", "q8_0"]
_FILE_TYPE = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
_ARCH = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Our name of a family -> llama.cpp's."""
_OTHER_WAY = "Export with --to merged and run llama.cpp's convert_hf_to_gguf.py on that folder."


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    file: Path
    num_tensors: int
    num_bytes: int


def write_gguf(
    folder: str | Path, output: str | Path, *, number_type: NumberType = "f16", name: str = ""
) -> WrittenFile:
    """Write the model in `folder` to the file `output`, which appears whole or not at all.

    Norms and biases stay float32 whatever the number type, as llama.cpp wants them.

    Raises:
        NotSupportedError: The family, its rope, its window or its tokenizer does not fit in a file.
    """
    import gguf

    from tinkex.engine.model.base_model import ModelSource

    folder, output = Path(folder), Path(output)
    config = ModelSource(str(folder), folder).config()
    _check(config)
    writer = gguf.GGUFWriter(None, _ARCH[config.arch])
    _add_shape(writer, config, number_type, name or folder.name)
    add_tokens(writer, folder, config)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".gguf-") as scratch:
        aside = Path(scratch) / output.name
        num_tensors = _write(writer, aside, folder, config, number_type)
        aside.replace(output)
    return WrittenFile(file=output, num_tensors=num_tensors, num_bytes=output.stat().st_size)


def _check(config: ModelConfig) -> None:
    # Each of these changes the output of the model, and llama.cpp would run the file without it.
    kind = config.rope.kind
    stretched = kind == "yarn" or (kind != "default" and _ARCH.get(config.arch) != "llama")
    reasons = {
        f"the family {config.arch!r}": config.arch not in _ARCH or not config.native,
        f"rope scaling {config.rope.kind!r} of {config.arch}": stretched,
        "a sliding attention window": any(config.windows),
        "a bias in attention": config.out_bias or (config.qkv_bias and config.arch != "qwen2"),
        "a bias in the MLP": config.mlp_bias,
    }
    if refused := [what for what, holds in reasons.items() if holds]:
        raise NotSupportedError(f"GGUF export does not know {refused[0]}. {_OTHER_WAY}")


def _add_shape(writer: Any, config: ModelConfig, number_type: NumberType, name: str) -> None:
    import gguf

    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPE[number_type]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.mlp_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rope.theta)
    if config.rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope.factor)


def _write(
    writer: Any, file: Path, folder: Path, config: ModelConfig, number_type: NumberType
) -> int:
    """Two passes over the weights, so that memory holds one tensor: sizes first, then data."""
    num_tensors = 0
    for name, values in _tensors(folder, config):
        kind = _kind(name, values, number_type)
        writer.add_tensor_info(name, *_stored_as(values.shape, kind), raw_dtype=kind)
        num_tensors += 1
    writer.write_header_to_file(path=file)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        for name, values in _tensors(folder, config):
            writer.write_tensor_data(_converted(name, values, _kind(name, values, number_type)))
    finally:
        writer.close()
    return num_tensors


def _tensors(folder: Path, config: ModelConfig) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor of the file under llama.cpp's name, in float32."""
    import gguf

    from tinkex.engine.model.weights import SafetensorsWeights

    arch = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[_ARCH[config.arch]]
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    weights = SafetensorsWeights(folder)
    if config.rope.kind == "llama3":
        yield "rope_freqs.weight", _rope_factors(config)
    for hf in sorted(weights.names()):
        if config.tied_head and hf == "lm_head.weight":
            continue  # A copy of the embedding, which llama.cpp uses for both.
        if hf.endswith("rotary_emb.inv_freq"):
            continue  # Old files store what the config already says.
        if (name := names.get_name(hf, try_suffixes=(".weight", ".bias"))) is None:
            raise NotSupportedError(f"GGUF export does not know the tensor {hf}. {_OTHER_WAY}")
        values = weights.read(hf).float().numpy()
        # llama.cpp's other families rotate halves, as Hugging Face does.
        if _ARCH[config.arch] == "llama":
            if ".q_proj." in hf:
                values = permute_rope_rows(values, config.num_heads)
            elif ".k_proj." in hf:
                values = permute_rope_rows(values, config.num_kv_heads)
        yield name, values


def _rope_factors(config: ModelConfig) -> NDArray[np.float32]:
    """Divisors of the plain rope frequencies, as llama.cpp stores the stretching of Llama 3.1."""
    from tinkex.engine.model.decoder import rope_frequencies

    plain = rope_frequencies(replace(config.rope, kind="default"), config.head_size)
    factors: NDArray[np.float32] = (plain / rope_frequencies(config.rope, config.head_size)).numpy()
    return factors


def permute_rope_rows(rows_RC: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Interleave the two rope halves of each head: llama.cpp rotates neighbours, HF halves."""
    import numpy as np

    half = rows_RC.shape[0] // num_heads // 2
    split = rows_RC.reshape(num_heads, 2, half, *rows_RC.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows_RC.shape)


def _kind(name: str, values: NDArray[np.float32], number_type: NumberType) -> Any:
    """How one tensor is stored. Rows that do not fill blocks of 32 stay float16, as llama.cpp's."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    if values.ndim == 1 or number_type == "f32":
        return kinds.F32
    if number_type == "q8_0" and values.shape[-1] % gguf.GGML_QUANT_SIZES[kinds.Q8_0][0] == 0:
        return kinds.Q8_0
    return kinds.F16


def _stored_as(shape: tuple[int, ...], kind: Any) -> tuple[tuple[int, ...], Any, int]:
    """(shape, dtype, size in bytes) as the writer asks for them."""
    import gguf
    import numpy as np

    kinds = gguf.GGMLQuantizationType
    if kind in (kinds.F32, kinds.F16):
        dtype = np.dtype(np.float32 if kind == kinds.F32 else np.float16)
        return shape, dtype, int(np.prod(shape)) * dtype.itemsize
    in_bytes = gguf.quant_shape_to_byte_shape(shape, kind)
    return in_bytes, np.dtype(np.uint8), int(np.prod(in_bytes))


def _converted(name: str, values: NDArray[np.float32], kind: Any) -> Any:
    import gguf
    import numpy as np

    if kind != gguf.GGMLQuantizationType.F32 and float(np.abs(values).max()) > 65504:
        raise InvalidInputError(f"{name} holds values beyond float16. Export with --type f32.")
    return gguf.quantize(values, kind)
