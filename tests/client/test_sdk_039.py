"""What the pages of SDK 0.38 and 0.39 show, against a server on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import tinkex
from tinkex import types
from tinkex.client.config import ClientConfig

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"


@pytest.fixture(scope="module")
def service(toy_server: str) -> Iterator[tinkex.ServiceClient]:
    config = ClientConfig(
        base_url=toy_server, api_key="tml-039", telemetry=False, project_id="alpha"
    )
    with tinkex.ServiceClient(config=config) as made:
        yield made


def test_search_checkpoints_pages_by_its_next_cursor(service: tinkex.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model=MODEL, rank=4).result()
    for step in range(3):
        training.save_state(f"s{step}", user_metadata={"recipe": "demo"}).result()
    training.save_weights_for_sampler("other").result()
    rest = service.create_rest_client()
    request = types.CheckpointSearchRequest(
        project_ids=["alpha"],
        user_metadata={"recipe": "demo"},
        checkpoint_type="training",
        owner=types.OwnSearchOwner(),
        base_models=[MODEL],
        limit=2,
    )
    first = rest.search_checkpoints(request).result()
    assert [c.checkpoint_id for c in first.checkpoints] == ["weights/s2", "weights/s1"]
    assert {c.base_model for c in first.checkpoints} == {MODEL}
    assert isinstance(first.next_cursor, types.CheckpointSearchCursor)
    rest_of_it = types.CheckpointSearchRequest(
        project_ids=["alpha"],
        user_metadata={"recipe": "demo"},
        checkpoint_type="training",
        cursor=first.next_cursor,
    )
    second = rest.search_checkpoints(rest_of_it).result()
    assert [c.checkpoint_id for c in second.checkpoints] == ["weights/s0"]
    assert second.next_cursor is None


@pytest.mark.parametrize("limit", [0, 201, "x"])
def test_a_wrong_limit_is_refused_before_anything_is_sent(limit: object) -> None:
    with pytest.raises(tinkex.InvalidInputError, match="limit"):
        types.CheckpointSearchRequest(limit=limit)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"checkpoint_type": "x"}, "must be 'training', 'sampler' or 'external', got 'x'"),
        ({"owner": {"type": "x"}}, "with a 'type' of 'own', 'accessible' or 'user', got"),
        ({"owner": {}}, "owner: must be an object with a 'type', got {}"),
        ({"owner": None}, "owner: must be an object, got None"),
        (
            {"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_checkpoint_uuid": "u"}},
            "cursor.last_created_at: must be a time with its zone",
        ),
    ],
)
def test_a_wrong_condition_is_told_with_all_that_would_do(given: dict[str, Any], text: str) -> None:
    with pytest.raises(tinkex.InvalidInputError, match=text):
        types.CheckpointSearchRequest.from_dict(given)


def test_a_search_and_its_cursor_have_the_documented_fields_and_no_others() -> None:
    named = "project_ids user_metadata checkpoint_type owner base_models limit cursor"
    assert set(types.CheckpointSearchRequest.model_fields) == set(named.split())
    cursor = set(types.CheckpointSearchCursor.model_fields)
    assert cursor == {"last_created_at", "last_checkpoint_uuid"}
    with pytest.raises(tinkex.InvalidInputError, match="page"):
        types.CheckpointSearchRequest(page=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("limit", [1, 200])
def test_a_page_has_from_1_to_200_checkpoints(limit: int) -> None:
    assert types.CheckpointSearchRequest(limit=limit).limit == limit


async def test_a_search_is_awaited_and_an_empty_list_of_models_matches_nothing(
    toy_server: str,
) -> None:
    config = ClientConfig(base_url=toy_server, api_key="tml-039-await", telemetry=False)
    with tinkex.ServiceClient(config=config) as service:
        training = await service.create_lora_training_client(base_model=MODEL, rank=4)
        saved = await training.save_state("kept")
        rest = service.create_rest_client()
        found = await rest.search_checkpoints(types.CheckpointSearchRequest())
        assert found.checkpoints[0].tinker_path == saved.path  # newest first
        none = await rest.search_checkpoints(types.CheckpointSearchRequest(base_models=[]))
        assert (none.checkpoints, none.next_cursor) == ([], None)
        with pytest.raises(tinkex.NotFoundError, match="nobody"):
            await rest.search_checkpoints(types.CheckpointSearchRequest(project_ids=["nobody"]))


def test_external_weights_are_uploaded_by_put_and_become_a_checkpoint(
    service: tinkex.ServiceClient,
) -> None:
    """The three calls of the documentation, with the files of an export; then it is sampled."""
    training = service.create_lora_training_client(base_model=MODEL, rank=4).result()
    export = training.save_weights_external("out").result().path
    rest = service.create_rest_client()
    urls = rest.get_external_weights_urls(export).result().urls
    files = {name: httpx.get(url).content for name, url in urls.items()}
    upload = rest.external_weights_upload_start(
        base_model=MODEL, lora_config=types.LoraConfig(rank=4), destination_project_id="beta"
    ).result()
    assert isinstance(upload, types.ExternalWeightsUploadStartResult)
    assert upload.expires.tzinfo is not None
    for name, url in upload.urls.items():
        assert httpx.put(url, content=files[name]).is_success
    done = rest.external_weights_upload_finish(upload.upload_id).result()
    assert done.tinker_path.endswith("/external_weights/uploaded")
    request = types.CheckpointSearchRequest(project_ids=["beta"], checkpoint_type="external")
    [found] = rest.search_checkpoints(request).result().checkpoints
    assert (found.tinker_path, found.base_model) == (done.tinker_path, MODEL)
    prompt = types.ModelInput.from_ints([1, 2, 3])
    params = types.SamplingParams(max_tokens=4, temperature=0.0)
    sampled = [
        service.create_sampling_client(path).result().sample(prompt, 1, params).result()
        for path in (done.tinker_path, export)
    ]
    assert sampled[0].sequences[0].tokens == sampled[1].sequences[0].tokens
    trainer = service.create_training_client_from_state(done.tinker_path).result()
    assert trainer.get_info().result().lora_rank == 4


def test_the_inflight_clients_of_a_model_follow_its_last_inflight_save(
    service: tinkex.ServiceClient,
) -> None:
    """The documented example: `a` adopts the weights published for `b`; a snapshot never does."""
    training = service.create_lora_training_client(base_model=MODEL, rank=4).result()
    prompt = types.ModelInput.from_ints([1, 2, 3, 4])

    def publish(kind: types.SamplingClientKind) -> tinkex.SamplingClient:
        return training.save_weights_and_get_sampling_client(kind=kind).result()

    def logprobs(sampler: tinkex.SamplingClient) -> list[float | None]:
        return sampler.compute_logprobs(prompt).result()

    frozen, a = publish("snapshot"), publish("inflight")
    untrained = logprobs(a)
    assert logprobs(frozen) == untrained
    targets = types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3])
    weights = types.TensorData(data=[1.0] * 3, dtype="float32", shape=[3])
    inputs = {"target_tokens": targets, "weights": weights}
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    assert logprobs(a) == untrained  # trained, but not published
    b = publish("inflight")
    assert logprobs(b) != untrained
    assert logprobs(a) == logprobs(b)
    assert logprobs(frozen) == untrained


def test_a_named_save_cannot_be_inflight(service: tinkex.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model=MODEL, rank=4).result()
    body = {"model_id": training.model_id, "path": "named", "kind": "inflight", "seq_id": 1}
    answer = httpx.post(
        f"{service.get_server_address()}/api/v1/save_weights_for_sampler",
        json=body,
        headers={"X-API-Key": "tml-039"},
    )
    assert answer.status_code == 400
    assert "only an unnamed save can be 'inflight'" in answer.text


def test_a_rest_client_says_what_the_server_offers(service: tinkex.ServiceClient) -> None:
    offered = service.create_rest_client().get_server_capabilities().result().supported_models
    assert MODEL in [model.model_name for model in offered]


def test_an_upload_that_was_never_started_is_refused_by_its_name(
    service: tinkex.ServiceClient,
) -> None:
    rest = service.create_rest_client()
    with pytest.raises(tinkex.NotFoundError, match="No upload 'nobody' of yours"):
        rest.external_weights_upload_finish("nobody").result()
    with pytest.raises(tinkex.InvalidInputError, match="rank"):
        rest.external_weights_upload_start(MODEL, types.LoraConfig(rank=0))
