"""What sees and reads in a model of transformers, without the output head, in one form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .families.names import body_of, language_model_of

if TYPE_CHECKING:
    from transformers.modeling_outputs import BaseModelOutputWithPooling  # which takes a second


class BesideHead(nn.Module):
    """The body of Llama 4, whose language model has its output head inside, and which projects what its tower makes by
    itself."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self._whole: list[Any] = [whole]  # in a list, so that it is no part of this one
        self.config = whole.config
        self.language_model = language_model_of(whole)
        self.vision_model, self.multi_modal_projector = whole.vision_model, whole.multi_modal_projector
        self.dtype = whole.dtype

    def forward(self, **inputs: Any) -> Any:
        """What the language model returns where the whole model gets these inputs."""
        made: list[Any] = []
        hook = self.language_model.register_forward_hook(lambda _, __, output: made.append(output))
        try:
            self._whole[0](**inputs)
        finally:
            hook.remove()
        return made[0]

    def get_image_features(self, pixel_values: Tensor, **options: Any) -> BaseModelOutputWithPooling:
        made = self._whole[0].get_image_features(pixel_values, **options)
        made.pooler_output = self.multi_modal_projector(made.last_hidden_state.flatten(0, -2))
        found: BaseModelOutputWithPooling = made
        return found


def seeing_body(whole: Any) -> Any:
    body = body_of(whole)
    return BesideHead(whole) if body is whole else body
