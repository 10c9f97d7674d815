"""The reference names every public thing: names, types, metrics; the tables are the engine's."""

from __future__ import annotations

import enum
import inspect
import pydoc
import re
import sys
from pathlib import Path

import pytest

import tinkex
import tinkex.regularizers
import tinkex.types

ROOT = Path(__file__).parents[2]
METRICS = (ROOT / "docs" / "api" / "metrics.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def api():
    """The pages as `make docs` writes them."""
    sys.path.insert(0, str(ROOT / "dev"))
    import api_pages

    yield api_pages.pages()
    sys.path.remove(str(ROOT / "dev"))
    for module in ("api_pages", "explanations"):
        sys.modules.pop(module, None)


def test_every_public_name_is_in_the_reference(api):
    everything = "\n".join(api.values())
    told = {line.rpartition(".")[2] for line in re.findall(r"^::: (\S+)$", everything, re.M)}
    told |= set(re.findall(r"^### (\w+)$", api["api/types.md"], re.M))
    told |= set(re.findall(r"^## `tinkex\.(\w+)`$", everything, re.M))
    public = {*tinkex.__all__, *tinkex.types.__all__, *tinkex.regularizers.__all__}
    modules = {"errors", "regularizers", "types", "__title__", "__version__"}
    assert public - modules - told == set()


@pytest.fixture(scope="module")
def meanings(api):
    """The explanation of every parameter and field, by `Class(parameter)` or `Class.field`."""
    import api_pages
    import explanations

    names = re.findall(r"^::: (\S+)$", "\n".join(api.values()), re.M)
    owners = {name: pydoc.locate(name) for name in names}
    found = {
        (f"{name}({method}: {parameter})", parameter): said
        for name, owner in owners.items()
        if not inspect.ismodule(owner)
        for (parameter, method), said in explanations.unsaid(owner).items()
    }
    assert len(found) > 100
    kinds = [getattr(tinkex.types, name) for name in tinkex.types.__all__]
    kinds = [kind for kind in kinds if inspect.isclass(kind) and not issubclass(kind, enum.Enum)]
    for kind in kinds:
        fields = getattr(kind, "model_fields", {})
        for name, *_ in api_pages._fields(kind):
            meaning = api_pages.meaning(kind, name, fields.get(name))
            found[f"{kind.__name__}.{name}", name] = meaning
    assert len(found) > 600
    return found


def test_every_parameter_and_field_is_explained(meanings):
    """In its docstring, or in dev/glossary.txt; its bounds alone are no explanation."""
    assert [where for (where, _), said in meanings.items() if not said] == []


FILLERS = {"a", "an", "and", "are", "as", "at", "by", "for", "in", "is", "it", "of", "on", "that"}
FILLERS |= {"the", "thi", "to", "wa", "were", "what", "which", "with"}  # without their plural


def words(text: str) -> set[str]:
    """The words of a text without their plural."""
    return {word.removesuffix("s") for word in re.findall(r"[a-z0-9]+", text.lower())}


def test_an_explanation_says_more_than_the_name(meanings):
    """`text`: "The text." and `user_id`: "The id of the user." were explanations once."""
    repeated = {
        where: said
        for (where, name), said in meanings.items()
        if not words(said) - FILLERS - words(name.replace("_", " "))
    }
    assert repeated == {}


def test_a_word_of_several_meanings_has_that_of_its_class(meanings):
    """The `path` of an error was explained as that of a checkpoint, its `request` as a search."""
    said = {where.removeprefix("tinkex."): text for (where, _), text in meanings.items()}
    assert "field that is wrong" in said["errors.InvalidInputError(: path)"]
    assert "HTTP request" in said["errors.APIStatusError(: request)"]
    assert "tags" in said["ServiceClient(: kwargs)"]
    assert "logprobs" in said["regularizers.Entropy(: temperature)"]
    assert "Only 1" in said["TrainingClient(forward_backward_reverse_kl: temperature)"]
    assert "one check" in said["RunMonitor(: timeout_s)"]
    assert "Without effect" in said["TrainingClient(save_weights_and_get_sampling_client: name)"]


def test_no_entry_of_the_glossary_is_left_over(api):
    import api_pages
    import explanations

    pages = "\n".join(api.values())
    kinds = [getattr(tinkex.types, name) for name in tinkex.types.__all__]
    owners = {kind.__name__ for kind in kinds if inspect.isclass(kind)}
    owners |= {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", pages, re.M)}
    for entry, text in explanations.glossary().items():
        assert text.endswith("."), entry
        owner, *method, name = entry.split(".") if "." in entry else ("", entry)
        assert not method or f"| `{name}` of `{method[0]}` |" in pages, entry
        assert f"| `{name}` |" in pages or method, f"nothing is called {entry}"
        assert not owner or owner in owners, entry
    assert api_pages.HEAD in pages


def test_awaited_twins_show_the_type_of_their_value():
    """`help()` of an `_async` method: what `await` gives, not the future's class."""
    shown = inspect.signature(tinkex.RestClient.get_training_run_async)
    assert "TrainingRun" in str(shown.return_annotation)
    assert "Future" not in str(shown.return_annotation)
    for client in (tinkex.ServiceClient, tinkex.TrainingClient, tinkex.SamplingClient):
        for method in ("get_tokenizer", "get_telemetry", "create_custom_loss"):
            if hasattr(client, method):
                result = inspect.signature(getattr(client, method)).return_annotation
                assert "Any" not in str(result), f"{client.__name__}.{method}"


@pytest.mark.parametrize("name", ["AdamParams", "SamplingParams", "LoraConfig"])
def test_every_field_of_a_type_has_its_default(api, name):
    section = api["api/types.md"].partition(f"### {name}\n")[2].partition("\n### ")[0]
    for field, info in getattr(tinkex.types, name).model_fields.items():
        assert f"| `{field}` |" in section
        if not info.is_required():
            assert f"`{info.default!r}`" in section


def test_every_metric_of_the_source_is_explained():
    """A name is a string such as "loss:sum" anywhere in the package."""
    named = re.compile(r'"((?:[a-z_0-9]+/)?[a-z_0-9]+:(?:sum|mean|max|min))"')
    found = {
        metric
        for file in (ROOT / "src" / "tinkex").rglob("*.py")
        if "conformance" not in file.parts
        for metric in named.findall(file.read_text(encoding="utf-8"))
    }
    assert len(found) > 15
    dpo = {"accuracy:sum", "margin:sum"}  # of its custom loss; the recipe reports them as its own
    assert {metric for metric in found - dpo if f"`{metric}`" not in METRICS} == set()


def test_the_shapes_of_the_fit_table_are_those_of_the_models_they_name(monkeypatch):
    """As many parameters as the models' cards say, within two percent."""
    monkeypatch.syspath_prepend(str(ROOT / "dev"))
    import torch
    from fit_table import MODELS

    from tinkex.engine.torch.survey import needs

    published = {
        "SmolLM2-135M": 0.1345,
        "Qwen3-0.6B": 0.596,
        "Llama-3.2-1B": 1.236,
        "Qwen3-1.7B": 1.72,
        "Llama-3.2-3B": 3.213,
        "Qwen3-4B": 4.02,
        "Mistral-7B-v0.3": 7.248,
        "Llama-3.1-8B": 8.03,
        "Qwen3-8B": 8.19,
        "Qwen3-14B": 14.77,
        "Qwen3-30B-A3B": 30.53,
        "Qwen3-32B": 32.76,
    }
    assert MODELS.keys() == published.keys()
    for name, config in MODELS.items():
        weights = needs(config, torch.float32, length=1, rank=1).weights
        assert weights / 4e9 == pytest.approx(published[name], rel=0.02), name
    sys.modules.pop("fit_table", None)
