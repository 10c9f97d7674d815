"""Take trained weights elsewhere: a PEFT adapter for vLLM, and one GGUF file for llama.cpp.

python examples/export.py        # about a minute on two CPU cores; needs the extra `gguf`
"""

import json
import tempfile
from pathlib import Path

import gguf

import tinkex
from tinkex.cli.app import run as tinkex_command

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
LINE = "The ship is called the Jolly Gradient."


def train(service):
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=0).result()
    tokens = training.get_tokenizer().encode(LINE)
    datum = tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    losses = []
    for _ in range(8):
        result = training.forward_backward([datum], "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=1e-3))
        losses.append(result.result().metrics["loss:sum"])
    print(f"loss {losses[0]:.1f} -> {losses[-1]:.1f}")
    assert losses[-1] < losses[0] / 4
    return training.save_weights_for_sampler("ship").result().path


def main():
    with tempfile.TemporaryDirectory() as name, tinkex.ServiceClient() as service:
        folder = Path(name)
        path = train(service)

        adapter = folder / "adapter"
        assert tinkex_command(["export", path, "-o", str(adapter)]) == 0
        config = json.loads((adapter / "adapter_config.json").read_text())
        print(
            f"\nPEFT adapter: rank {config['r']}, {len(config['target_modules'])} kinds of layers"
        )
        for file in sorted(adapter.iterdir()):
            print(f"  {file.name:28} {file.stat().st_size / 1e6:6.2f} MB")
        print("  vllm serve BASE --enable-lora --lora-modules ship=adapter")
        assert config["peft_type"] == "LORA"
        assert (adapter / "adapter_model.safetensors").stat().st_size > 1e6

        file = folder / "ship.gguf"
        assert tinkex_command(["export", path, "-o", str(file), "--to", "gguf"]) == 0
        read = gguf.GGUFReader(file)
        tokens = read.fields["tokenizer.ggml.tokens"]
        print(f"\nGGUF: {file.stat().st_size / 1e6:.0f} MB, {len(read.tensors)} tensors,")
        print(f"  {len(tokens.data):,} tokens, chat template included")
        print('  llama-cli -m ship.gguf -p "The ship is called the"')
        assert "tokenizer.chat_template" in read.fields
        assert {"output.weight", "token_embd.weight"} <= {t.name for t in read.tensors}


if __name__ == "__main__":
    main()
