"""What training makes, in one place: the same recipe gives the same model on the same machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from corpus import CHOICES, FIXES, LATE, MIX, SHORT
from network import Shape


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one mix of skills, which ends at step `until`.

    Its learning rates are `peak` times the recipe's; over its last `decay` steps they fall to zero.
    """

    until: int
    mix: dict[str, float] = field(default_factory=lambda: MIX)
    prompt_weight: float = 0.2
    peak: float = 1.0
    decay: int = 0


@dataclass(frozen=True)
class Recipe:
    """A training run. After its start, and after every phase that fell to zero, the rates rise over `warmup` steps."""

    phases: tuple[Phase, ...]
    shape: Shape = field(default_factory=Shape)
    seed: int = 0
    batch_size: int = 32  # conversations a step
    batch_tokens: int = 1024  # of one tensor
    longest: int = 1024
    matrix_rate: float = 4e-3
    vector_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup: int = 60
    tokenizer_samples: int = 20000

    @property
    def steps(self) -> int:
        """Of all phases."""
        return self.phases[-1].until

    def phase(self, step: int) -> Phase:
        """The one that step belongs to."""
        return next(phase for phase in self.phases if step < phase.until)

    def rate(self, step: int) -> float:
        """What the learning rates are multiplied by in this step."""
        phase = self.phase(step)
        rested = max((one.until for one in self.phases if one.decay and one.until <= step), default=0)
        left = (phase.until - step) / phase.decay if phase.decay else 1.0
        return phase.peak * min(1.0, (step - rested + 1) / self.warmup, left)


RECIPES: dict[str, Recipe] = {
    "nano": Recipe(
        phases=(
            *(Phase(650), Phase(1450, LATE, decay=450), Phase(1900, FIXES, peak=0.8, decay=200)),
            Phase(3300, FIXES, decay=500),
            Phase(3800, CHOICES, peak=0.8, decay=420),
            Phase(4250, SHORT, peak=0.8, decay=390),
        )
    ),
}
