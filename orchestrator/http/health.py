"""What those who run the orchestrator ask: whether it serves, its metrics, its models."""

import asyncio

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from orchestrator.http.front import Asking, FrontHere, calling
from orchestrator.http.shown import ERRORS, HealthShown, ModelShown, ModelsShown
from outrider.errors import NotFound
from outrider.generation import ModelDescription

RETRY_S = 1

router = APIRouter()


@router.get("/health", tags=["operations"], responses={200: {"model": HealthShown}, 503: {"model": HealthShown}})
async def health(front: FrontHere) -> JSONResponse:
    """Say whether requests are served: 200, or 503 and why not."""
    why_not = front.why_not()
    if why_not:
        return JSONResponse({"status": "not_serving", "reason": why_not}, 503, {"retry-after": str(RETRY_S)})
    return JSONResponse({"status": "serving", "reason": ""})


@router.get(
    "/metrics",
    tags=["operations"],
    dependencies=[Depends(calling)],
    response_class=Response,
    responses=ERRORS | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(front: FrontHere) -> Response:
    """Show the orchestrator's metrics to Prometheus; where keys are required, to whoever has one."""
    text = await asyncio.to_thread(generate_latest, front.metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models", tags=["models"], responses=ERRORS)
async def models(front: FrontHere, caller: Asking) -> ModelsShown:
    """List the models that can be asked for now."""
    found = await front.open_desk.sessions.models()
    return ModelsShown(object="list", data=[_model(each) for each in found])


@router.get("/v1/models/{model:path}", tags=["models"], responses=ERRORS)
async def model(model: str, front: FrontHere, caller: Asking) -> ModelShown:
    """Describe a model."""
    for each in await front.open_desk.sessions.models():
        if each.model == model:
            return _model(each)
    raise NotFound(f"there is no model {model!r} here")


def _model(described: ModelDescription) -> ModelShown:
    size, fingerprint = described.vocabulary.size, described.vocabulary.fingerprint
    return ModelShown(
        id=described.model,
        object="model",
        created=0,
        owned_by="outrider",
        max_model_len=described.context_len,
        outrider={
            "num_verifiers": described.num_verifiers,
            "drafters": list(described.drafters),
            "vocabulary": {"size": size, "fingerprint": fingerprint},
        },
    )
