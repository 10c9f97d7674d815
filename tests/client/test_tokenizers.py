"""Which tokenizer a model has, and where it is found (R25)."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tinkex import ServiceClient, events
from tinkex.chat.tokenizer import FastTokenizer
from tinkex.client import tokenizers
from tinkex.client.config import LLAMA3_MIRRORS, ClientConfig
from tinkex.client.tokenizers import candidate_ids, load_tokenizer
from tinkex.errors import ModelNotFoundError, NotSupportedError
from tinkex.types.data.model_input import ModelInput

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a tiny tokenizer in ./acme/tiny, and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TINKEX_CACHE", str(tmp_path / "cache"))
    tokenizers.clear_cache()
    yield write_tokenizer(tmp_path / "acme" / "tiny")
    tokenizers.clear_cache()


def write_tokenizer(folder: Path, *words: str) -> Path:
    vocabulary = {w: i for i, w in enumerate(["[UNK]", "</s>", "hello", "world", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "unk_token": "[UNK]",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "tokenizer_id", "ids"),
    [
        ("Qwen/Qwen3-8B", None, ["Qwen/Qwen3-8B"]),
        ("Qwen/Qwen3-8B:fp8", None, ["Qwen/Qwen3-8B"]),
        ("org/model/variant", None, ["org/model"]),
        ("Qwen/Qwen3-8B", "other/tokenizer:rev", ["other/tokenizer"]),
        ("org/model", "/data/tokenizer", ["/data/tokenizer", "org/model"]),
        (
            "meta-llama/Llama-3.1-8B",
            None,
            [
                "meta-llama/Llama-3.1-8B",
                "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer",
                "baseten/Meta-Llama-3-tokenizer",
            ],
        ),
        *(
            (name, None, [name, *LLAMA3_MIRRORS])
            for name in (
                "meta-llama/Meta-Llama-3-8B-Instruct",
                "unsloth/llama-3-8b",
                "NousResearch/Meta-Llama-3-8B",
                "nvidia/Llama-3.1-Nemotron-70B",
            )
        ),
        ("meta-llama/Llama-3.1-8B", "x/y", ["x/y"]),
        ("meta-llama/Llama-2-7b", None, ["meta-llama/Llama-2-7b"]),
    ],
)
def test_ids_are_tried_in_the_promised_order(name, tokenizer_id, ids):
    """R25: the server's id, else the model's name, else the mirrors of Llama 3."""
    assert candidate_ids(name, tokenizer_id) == ids


def test_the_mirrors_are_a_setting():
    name = "meta-llama/Meta-Llama-3-8B"
    assert candidate_ids(name, mirrors=("own/copy",)) == [name, "own/copy"]
    assert candidate_ids(name, mirrors=()) == [name]
    env = {"TINKEX_TOKENIZER_MIRRORS": "a/b, c/d"}
    assert ClientConfig.from_env(env=env).tokenizer_mirrors == ("a/b", "c/d")
    assert ClientConfig.from_env(env={}).tokenizer_mirrors == LLAMA3_MIRRORS


@pytest.mark.parametrize("name", ["TML/private", "thinkingmachines/private", ""])
def test_a_private_or_missing_name_says_so(name):
    with pytest.raises(NotSupportedError):
        candidate_ids(name)


def test_a_folder_named_like_the_model_is_found_without_the_hub(folder):
    tokenizer = load_tokenizer("acme/tiny")
    assert tokenizer.is_fast
    assert tokenizer.encode("hello world") == [2, 3]
    assert tokenizer.decode([2, 3]) == "hello world"
    assert load_tokenizer(str(folder)).encode("world") == [3]


def test_a_folder_with_half_a_tokenizer_is_named_with_what_is_missing(tmp_path):
    """Its config alone: transformers raises a ValueError about its own converters."""
    half = tmp_path / "half"
    half.mkdir()
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (half / "tokenizer_config.json").write_text(json.dumps(config))
    (half / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelNotFoundError, match=r"half.*Put its tokenizer\.json there"):
        load_tokenizer(str(half))


def test_a_tokenizer_is_loaded_once_per_resolved_id(folder):
    assert load_tokenizer("acme/tiny") is load_tokenizer("acme/tiny:variant")


def test_a_folder_of_the_servers_machine_falls_back_to_the_models_name(folder):
    tokenizer = load_tokenizer("acme/tiny", tokenizer_id="/somewhere/on/the/server")
    assert tokenizer.encode("hello") == [2]


def test_what_a_server_on_this_machine_fetched_is_found(folder, tmp_path):
    write_tokenizer(tmp_path / "cache" / "models" / "Base-Instruct-q4_1-v1", "cached")
    assert load_tokenizer("org/Base-Instruct").encode("cached") == [4]
    with pytest.raises(ModelNotFoundError):  # another model whose name begins alike
        load_tokenizer("org/Base")


def test_a_sampler_s_tokenizer_comes_with_the_model_that_the_server_fetches(
    folder, tmp_path, toy_server
):
    """The first program on a new machine, when it samples a base model and trains nothing."""
    base_model = "tinkex/SmolLM2-135M-Instruct-Q4"
    fetched = tmp_path / "cache" / "models" / "SmolLM2-135M-Instruct-q4_1-v1"

    def on_first_sample(event):
        """Stands for the server, which fetches a model when it is first used."""
        is_sample = event.name == "http.request.start" and "asample" in event.fields["path"]
        if is_sample and not fetched.exists():
            write_tokenizer(fetched, "captain")

    unsubscribe = events.subscribe(on_first_sample)
    try:
        with ServiceClient(base_url=toy_server) as service:
            sampler = service.create_sampling_client(base_model=base_model).result()
            assert not fetched.exists()
            assert sampler.get_tokenizer().encode("captain") == [4]
    finally:
        unsubscribe()


def test_a_tokenizer_that_is_nowhere_lists_where_it_was_looked_for(folder):
    with pytest.raises(ModelNotFoundError) as caught:
        load_tokenizer("org/nothing")
    assert "'org/nothing'" in str(caught.value)
    assert "relative to the working directory" in str(caught.value)


def test_the_plain_tokenizer_encodes_and_decodes_like_transformers(folder):
    plain, full = FastTokenizer.from_folder(folder), load_tokenizer("acme/tiny")
    text = "world hello unknown"
    assert plain.encode(text) == full.encode(text)
    assert plain.decode([2, 1], skip_special_tokens=True) == "hello"
    assert plain.decode(2) == "hello"
    assert plain.batch_decode([[2], [3]]) == ["hello", "world"]
    assert (plain.eos_token, plain.eos_token_id, plain.bos_token_id) == ("</s>", 1, None)
    assert len(plain) == plain.vocab_size == full.vocab_size == 4
    assert plain.convert_ids_to_tokens(plain.convert_tokens_to_ids("world")) == "world"


def test_a_chat_template_is_applied_only_when_asked_for(folder):
    """R25."""
    plain, full = FastTokenizer.from_folder(folder), load_tokenizer("acme/tiny")
    messages = [{"role": "user", "content": "hello"}]
    assert plain.encode("hello") == [2]
    ours = plain.apply_chat_template(messages, tokenize=False)
    assert ours == full.apply_chat_template(messages, tokenize=False) == "<user>hello"
    with pytest.raises(NotSupportedError, match="no chat template"):
        FastTokenizer(plain.backend_tokenizer, {}).apply_chat_template(messages)


@pytest.mark.parametrize("kind", ["transformers", "plain"])
def test_a_model_input_is_made_from_text_with_either(folder, kind):
    """R25: `ModelInput.from_text`."""
    tokenizer = (
        load_tokenizer("acme/tiny") if kind == "transformers" else FastTokenizer.from_folder(folder)
    )
    assert ModelInput.from_text("hello world", tokenizer).to_ints() == [2, 3]


def test_without_transformers_the_tokenizers_library_is_enough(folder):
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from tinkex.client.tokenizers import load_tokenizer\n"
        "t = load_tokenizer('acme/tiny')\n"
        "assert type(t).__name__ == 'FastTokenizer', t\n"
        "assert t.encode('hello world') == [2, 3]\n"
        "assert not {'torch', 'transformers'} & {k for k, v in sys.modules.items() if v}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500, cwd=Path.cwd())


@pytest.fixture
def light(default_model_dir, monkeypatch):
    monkeypatch.setenv("TINKEX_CACHE", str(default_model_dir.parents[1]))
    tokenizers.clear_cache()
    yield load_tokenizer("tinkex/SmolLM2-135M-Instruct-Q4")
    tokenizers.clear_cache()


def test_the_light_tokenizer_of_the_default_model_is_that_of_transformers(light):
    from transformers import AutoTokenizer

    whole = AutoTokenizer.from_pretrained(str(light.folder))
    messages = [
        {"role": "user", "content": 'naïve " \n 1234 <b>'},
        {"role": "assistant", "content": "  yes"},
    ]
    for generate in (False, True):
        told = {"tokenize": False, "add_generation_prompt": generate}
        text = whole.apply_chat_template(messages, **told)
        assert light.apply_chat_template(messages, **told) == text
        ids = whole.encode(text, add_special_tokens=False)
        assert light.encode(text, add_special_tokens=False) == ids
        assert light.decode(ids) == whole.decode(ids)
        assert light.decode(ids, skip_special_tokens=True) == whole.decode(ids, True)
    assert light.encode(" raw , text") == whole.encode(" raw , text")
    assert set(light.all_special_tokens) == set(whole.all_special_tokens)
    assert (len(light), light.vocab_size) == (len(whole), whole.vocab_size)
    assert light.eos_token_id == whole.eos_token_id
    assert light._loaded is None, "none of this needs transformers"


def test_what_the_light_tokenizer_does_not_have_transformers_does(light):
    assert light("hello")["input_ids"] == light.encode("hello")
    assert light.convert_tokens_to_ids(["hello", "Ġworld"]) == [
        light.convert_tokens_to_ids("hello"),
        light.convert_tokens_to_ids("Ġworld"),
    ]
    assert light.tokenize("hello world") == light.whole.tokenize("hello world")
    told = light.apply_chat_template([{"role": "user", "content": "hi"}])
    assert type(told) is type(light.whole.apply_chat_template([{"role": "user", "content": "hi"}]))
    again = pickle.loads(pickle.dumps(light))
    assert again.encode("hello") == light.encode("hello")
    with pytest.raises(AttributeError):
        light.no_such_thing  # noqa: B018


def test_the_default_model_s_tokenizer_takes_no_import_of_torch_or_transformers(light):
    code = (
        "import sys\n"
        "from tinkex.client.tokenizers import load_tokenizer\n"
        "t = load_tokenizer('tinkex/SmolLM2-135M-Instruct-Q4')\n"
        "assert t.decode(t.encode('hello world')) == 'hello world'\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)


def test_another_tokenizer_is_left_to_transformers(folder):
    assert not isinstance(load_tokenizer("acme/tiny"), FastTokenizer)


def test_templates_have_the_helpers_of_transformers(folder):
    light = FastTokenizer.from_folder(folder)
    light._config["chat_template"] = (
        "{% for m in messages %}{% if m['role'] == 'x' %}{% continue %}{% endif %}"
        "{{ m | tojson }}{{ eos_token }}{% endfor %}"
        "{% if not messages %}{{ raise_exception('no messages') }}{% endif %}"
        "{{ strftime_now('%Y') | length }}"
    )
    messages = [{"role": "x", "content": ""}, {"role": "user", "content": "<é>"}]
    text = light.apply_chat_template(messages, tokenize=False)
    assert text == '{"role": "user", "content": "<é>"}</s>4'
    with pytest.raises(Exception, match="no messages"):
        light.apply_chat_template([], tokenize=False)
