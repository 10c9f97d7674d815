"""The playground: chat and completion, by the routes of the OpenAI API for who has a cookie."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from tinkex.server.compat import fields
from tinkex.server.compat.chat_formats import ChatFormat
from tinkex.server.compat.dependencies import compat_of
from tinkex.server.compat.dialogue import Dialogue, find_model, understood
from tinkex.server.compat.openai_chat import ChatRequest, chat_completions
from tinkex.server.compat.openai_completions import CompletionRequest, completions
from tinkex.server.console.shell import PageRoute, page
from tinkex.server.console.visitors import Changing, Visitor
from tinkex.server.http.dependencies import service_of
from tinkex.server.http.handlers import answer
from tinkex.server.runs.descriptions import name_of
from tinkex.store import Checkpoint, User

MAX_CHECKPOINTS = 200
_GROUPS = (("Base models", "base"), ("Runs", "run"), ("Named checkpoints", "name"))
router = APIRouter(prefix="/console", route_class=PageRoute, include_in_schema=False)


@router.get("/playground")
async def playground(
    request: Request, user: Visitor, model: Annotated[str, Query(max_length=1000)] = ""
) -> Response:
    groups = await _choices(request, user)
    if model and not any(model == one for _, choices in groups for one, _ in choices):
        # An older checkpoint, or one of somebody else: never another model in its place.
        groups.insert(0, ("Chosen", [(model, model)]))
    return page(request, "playground.html", user, groups=groups, chosen=model)


async def _choices(request: Request, user: User) -> list[tuple[str, list[tuple[str, str]]]]:
    """Models to talk to, in groups of (model, its name for people)."""
    service = service_of(request)
    store = service.store
    listed = await compat_of(request).names.listed(user)
    rows = [one.checkpoint for one in listed if one.kind == "checkpoint"]
    sampled = [row for row in rows if row and row.kind == "sampler_weights"][:MAX_CHECKPOINTS]
    ids = {row.model_id for row in sampled}
    models = {run_id: await store.call(store.models.get, run_id) for run_id in ids}
    session_ids = {model.session_id for model in models.values() if model is not None}
    sessions = await store.call(store.sessions.by_id, session_ids)

    def called(row: Checkpoint) -> str:
        model = models.get(row.model_id)
        if model is None:
            return row.path
        session = sessions.get(model.session_id)
        name = name_of(model, session) or model.model_id
        return f"{name} · {row.name}"

    groups = [
        *(
            (says, [(one.name, one.name) for one in listed if one.kind == kind])
            for says, kind in _GROUPS
        ),
        ("Checkpoints of runs", [(row.path, called(row)) for row in sampled]),
    ]
    return [(says, choices) for says, choices in groups if choices]


@router.post("/api/chat")
async def chat(request: Request, user: Visitor, _: Changing) -> Response:
    return await chat_completions(request, user)


@router.post("/api/completion")
async def completion(request: Request, user: Visitor, _: Changing) -> Response:
    return await completions(request, user)


@router.post("/api/count/{kind}")
async def count(
    request: Request, user: Visitor, _: Changing, kind: Literal["chat", "completion"]
) -> Response:
    """How many tokens the model would read."""
    if kind == "chat":
        read = await fields.read(request, ChatRequest, understood)
        dialogue = await Dialogue.open(request, user, read[1])
        return answer({"num_tokens": len(dialogue.prompt)})
    body = await fields.read(request, CompletionRequest, lambda body: body)
    chat_format = (await find_model(request, user, body.model))[1]
    prompts = [prompt for prompt in body.prompts() if isinstance(prompt, str)]
    chat_formats = compat_of(request).chat_formats
    size = sum(map(len, prompts))
    return answer(
        {"num_tokens": await chat_formats.aside(user, size, _count, chat_format, prompts)}
    )


def _count(chat_format: ChatFormat, texts: list[str]) -> int:
    return sum(len(chat_format.tokens(text)) for text in texts)
