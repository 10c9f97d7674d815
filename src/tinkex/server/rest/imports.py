"""`POST /checkpoints/import`: an adapter made elsewhere becomes a checkpoint of a run of its own.

An extension of ours. The body is a tar of the adapter's folder (`adapter_config.json` and its
weights, as `peft` writes them). What is believed of it is decided in `adapter_folder.py`.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from tinkex.server.guard.auth import CurrentUser
from tinkex.server.http.bodies import read_body
from tinkex.server.http.dependencies import dependencies_of, service_of
from tinkex.server.http.handlers import serve
from tinkex.server.http.inputs import Text
from tinkex.server.rest import adapter_folder
from tinkex.server.runs import idle_run
from tinkex.types.account.checkpoints import TinkerPath, check_name

router = APIRouter(prefix="/api/v1", tags=["checkpoints"])


@serve(router, "import_checkpoint")
async def import_checkpoint(
    request: Request, user: CurrentUser, name: Text = "imported", base_model: Text | None = None
) -> dict[str, Any]:
    check_name(name)
    service = service_of(request)
    # Before the body is read: on a full disk a large upload would be for nothing.
    service.room.require()
    service.shelf.disk_quota.require(user.user_id)
    body = await read_body(request)
    target = TinkerPath(idle_run.new_run_id(), "weights", name)
    async with service.shelf.making(target) as folder:
        service.shelf.reserve(folder, user.user_id, len(body))  # a plain tar unpacks to no more
        facts = {"folder": str(folder), "size": len(body)}
        unpacked = await dependencies_of(request).sandbox.run(
            user.user_id, "unpack_adapter", facts, body, cost=len(body)
        )
        config, claims = unpacked["config"], unpacked["claims"]
        base = service.catalog.resolve(base_model or str(config.get("base_model_name_or_path")))
        await adapter_folder.prove(service, folder, base, claims, user)
        checkpoint = await adapter_folder.list_checkpoint(
            service,
            target,
            folder,
            user,
            lora=adapter_folder.lora_of(config),
            base_model=base,
            origin="import",
        )
    return {"tinker_path": checkpoint.path, "base_model": base, "size_bytes": checkpoint.size_bytes}
