"""The pipeline's stages and the contract that a stage of your own keeps: see `JobStage`."""

from ..schemas.errors import InvalidRequest, Refusal
from ..schemas.jobs import ValidatedJob
from .contract import Intake, JobStage, Pipe, Stage
from .runner import Runner

__all__ = ["Intake", "InvalidRequest", "JobStage", "Pipe", "Refusal", "Runner", "Stage", "ValidatedJob"]
