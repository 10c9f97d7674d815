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

router = APIRouter(prefix="/console", route_class=PageRoute, include_in_schema=False)


@router.get("/playground")
async def playground(
    request: Request, user: Visitor, model: Annotated[str, Query(max_length=1000)] = ""
) -> Response:
    service = service_of(request)
    rows, _ = await service.store.call(service.store.checkpoints.page, user.user_id, 200, 0)
    names = [*service.catalog.names, *(r.path for r in rows if r.kind == "sampler_weights")]
    return page(request, "playground.html", user, models=names, chosen=model or names[0])


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
