"""What the `process` of a stage may change in a job: nothing by which the request is known, nothing that has no effect,
and only so that each later stage can take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from ...schemas.errors import StageFailed
from ...schemas.jobs import ValidatedJob
from ...schemas.params import GenerationParams
from ...schemas.wire import codec
from ...schemas.wire.codec import DecodeError
from ...streams.stores.registry import Registry

NOTES = "metadata"  # the field of a body that never has an effect: stages may leave notes for others there
_IDENTITY = ("id", "tenant", "bridge", "priority", "endpoint", "created")


def body_marks(body: Mapping[str, Any]) -> dict[str, bytes]:
    """The fields of a body, to be compared after a `process` that may have changed them in their places."""
    return {name: to_json(value, inf_nan_mode="constants") for name, value in body.items() if name != NOTES}


async def check_changes(
    job: ValidatedJob, marks: Mapping[str, bytes], found: object, registry: Registry
) -> ValidatedJob:
    """`found`, which `process` has made of `job`, whose body had these marks, as a job.

    Raises `StageFailed` for what no other stage could take, and for what would have no effect.
    """
    if not isinstance(found, ValidatedJob):
        raise StageFailed(f"process returned a {type(found).__name__}, not a ValidatedJob")
    for field, value, kind in (("body", found.body, dict), ("params", found.params, GenerationParams)):
        if not isinstance(value, kind):
            raise StageFailed(f"process set {field} to a {type(value).__name__}, not a {kind.__name__}")
    try:
        after = body_marks(found.body)
    except ValueError as error:
        raise StageFailed(f"process returned a job that is not valid: body: {error}") from None
    if changed := [name for name in {**marks, **after} if marks.get(name) != after.get(name)]:
        raise StageFailed(
            f"process changed {', '.join(changed)} in the body, which has no effect: change the job's prompts or "
            f"params; notes for other stages belong in the body's {NOTES}"
        )
    if found is job:
        return job
    if changed := [name for name in _IDENTITY if getattr(found, name) != getattr(job, name)]:
        raise StageFailed(f"process changed {', '.join(changed)}, by which the request is known")
    if unknown := [
        name for model in (found, found.params) for name in model.model_fields_set - {*type(model).model_fields}
    ]:
        raise StageFailed(f"process set {', '.join(unknown)}, which a job does not have")
    try:
        codec.decode_model(ValidatedJob, codec.encode(found), codec.VALIDATED_JOB)
    except (DecodeError, TypeError, ValueError) as error:
        why = str(error) if isinstance(error, DecodeError) else type(error).__name__
        raise StageFailed(f"process returned a job that is not valid: {why}") from None
    if (found.model, found.revision) != (job.model, job.revision):
        card = await registry.find(found.model)
        if card is None or (card.name, card.revision) != (found.model, found.revision):
            raise StageFailed(
                f"process changed model to {found.model!r} in revision {found.revision}, which is not served here"
            )
    return found
