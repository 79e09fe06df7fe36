"""The pipeline's stages and the contract that a stage of your own keeps: see `JobStage` and `Filter`."""

from ..schemas.errors import InvalidRequest, Refusal
from ..schemas.events import Token
from ..schemas.jobs import ValidatedJob
from .contract import Intake, JobStage, Pipe, Stage
from .custom.filters import Filter
from .runner import Runner

__all__ = [
    "Filter",
    "Intake",
    "InvalidRequest",
    "JobStage",
    "Pipe",
    "Refusal",
    "Runner",
    "Stage",
    "Token",
    "ValidatedJob",
]
