"""``/v1/models``."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.entrypoints.openai.context import ServerContext


def _card(context: ServerContext) -> dict[str, Any]:
    return {
        "id": context.model_name,
        "object": "model",
        "created": context.started,
        "owned_by": "headrace",
        "root": context.model_name,
        "parent": None,
        "max_model_len": context.max_model_len,
        "permission": [],
    }


async def list_models(context: ServerContext, request: Request) -> Response:
    """``GET /v1/models``."""
    data = msgspec.json.encode({"object": "list", "data": [_card(context)]})
    return Response(data, media_type="application/json")


async def get_model(context: ServerContext, request: Request) -> Response:
    """``GET /v1/models/{model}``."""
    context.check_model(request.path_params["model"])
    return Response(msgspec.json.encode(_card(context)), media_type="application/json")
