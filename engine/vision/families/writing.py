"""How each family's processor describes a picture in numbers, and the text that it makes of them.

Source of each rule: `replace_image_token` in transformers' `processing_*.py`. Knows no torch and no transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ....schemas.errors import ModelLoadError
from .bounds import BUDGETS

OVIS_MARKS = "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"
JANUS_OPENING = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language.\n\n"
)
GEMMA3N_PROCESSOR: dict[str, Any] = {  # as of the published models
    "image_processor_type": "SiglipImageProcessor",
    "size": {"height": 768, "width": 768},
    "resample": 2,
    "do_normalize": False,
}
GOT_TEMPLATE = """<|im_start|>system
You should follow the instructions carefully and explain your answers in detail.<|im_end|>
{%- for message in messages -%}
<|im_start|>{{ message.role + '\\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content if part.type == 'image' %}<img><imgpad></img>{% endfor -%}
{{ '\\n' }}
{%- for part in message.content if part.type == 'text' %}{{ part.text }}{% else %}{{ ' OCR: ' }}{% endfor -%}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>{{ 'assistant\\n' }}{% endif -%}
"""
PALIGEMMA_TEMPLATE = """
{%- set message = messages[0] -%}
{%- if messages | length > 1 or message.role != 'user' or message.content is string -%}
{{ raise_exception('this model takes one message of the user and no others, with images and a short prompt such as ' +
'"caption en" or "answer en How many are there?"') }}
{%- endif -%}
{%- for part in message.content if part.type == 'image' -%}<image>{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
"""
EDGE = "<fake_token_around_image>"
_JANUS = {"image_size": 384, "patch_size": 16}
Config = Mapping[str, Any]
Grid = tuple[int, ...]


def side_of(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)


def tower_of(config: Config) -> Config:
    found: Config = config["vision_config"]
    return found


def image_token(config: Config) -> int:
    """The id of the token that stands for a part of an image. Raises `ModelLoadError`."""
    found = config.get("image_token_id", config.get("image_token_index"))
    if not isinstance(found, int):
        raise ModelLoadError("config.json does not give image_token_id; the model's files are incomplete")
    return found


def shape(_: Config, made: Mapping[str, Any]) -> Grid:
    height, width = made["pixel_values"][0].shape[-2:]
    return int(height), int(width)


def write_llava(config: Config, grid: Grid, mark: str) -> str:
    tower = tower_of(config)
    patch = side_of(tower.get("patch_size", 14))
    count: int = (grid[0] // patch) * (grid[1] // patch)
    count += tower.get("model_type", "clip_vision_model") == "clip_vision_model"  # it has a token for the class
    return mark * (count - bool(config.get("vision_feature_select_strategy", "default") == "default"))


def side_and_crops(_: Config, made: Mapping[str, Any]) -> Grid:
    """How many pixels wide each crop is, and how many crops there are."""
    return int(made["pixel_values"].shape[-1]), len(made["pixel_values"])


def write_aria(config: Config, grid: Grid, mark: str) -> str:
    """Raises `ModelLoadError`."""
    side, count = grid
    patches = (side // side_of(tower_of(config).get("patch_size", 14))) ** 2
    known = config.get("projector_patch_to_query_dict") or {1225: 128, 4900: 256}
    found = {int(one): int(tokens) for one, tokens in known.items()}.get(patches)
    if found is None:
        raise ModelLoadError(
            f"config.json does not say in projector_patch_to_query_dict how many tokens show {patches} patches of an "
            "image; the model's files do not fit each other"
        )
    return mark * (found * count)


def write_fast(config: Config, grid: Grid, mark: str) -> str:
    """Six convolutions halve the height and width."""
    height, width = (-(-side // 64) for side in grid)
    return mark * (height * width)


def write_vipllava(config: Config, grid: Grid, mark: str) -> str:
    """The first token of the tower is always left out."""
    return write_llava({**config, "vision_feature_select_strategy": "default"}, grid, mark)


def rows_and_columns(_: Config, made: Mapping[str, Any]) -> Grid:
    return int(made["rows"][0][0]), int(made["cols"][0][0])


def write_smolvlm(config: Config, grid: Grid, mark: str) -> str:
    tower, (rows, columns) = tower_of(config), grid
    side = side_of(tower.get("image_size", 224)) // side_of(tower.get("patch_size", 32))
    tile = mark * (side**2 // int(config.get("scale_factor", 2)) ** 2)
    whole = f"{EDGE}<global-img>{tile}{EDGE}"
    return whole if not rows and not columns else f"{_write_tiles(rows, columns, tile)}\n{whole}"


def _write_tiles(rows: int, columns: int, tile: str) -> str:
    """Each tile behind its place, in lines."""
    places = ([f"<row_{row}_col_{column}>" for column in range(1, columns + 1)] for row in range(1, rows + 1))
    return "".join("".join(f"{EDGE}{place}{tile}" for place in line) + "\n" for line in places)


def rows_columns_and_route(config: Config, made: Mapping[str, Any]) -> Grid:
    return *rows_and_columns(config, made), int("tile_fine_mask" in made)


def write_docling(config: Config, grid: Grid, mark: str) -> str:
    """`grid` are rows and columns of tiles, and whether each has four times as many tokens."""
    tower, (rows, columns, is_fine) = tower_of(config), grid
    side = side_of(tower.get("image_size", 512)) // side_of(tower.get("patch_size", 16))
    tile = mark * (side**2 // int(tower.get("scale_factor", 4)) ** 2 * (4 if is_fine else 1))
    whole = f"\n{EDGE}<global-img>{tile}{EDGE}" if rows * columns > 1 else ""
    return _write_tiles(rows, columns, tile) + whole


def no_grid(_: Config, made: Mapping[str, Any]) -> Grid:
    """Of those that show all pictures alike."""
    return ()


def write_got(config: Config, grid: Grid, mark: str) -> str:
    """Two convolutions halve the rows and columns of patches."""
    tower = tower_of(config)
    side = side_of(tower.get("image_size", 1024)) // side_of(tower.get("patch_size", 16))
    return mark * (-(-side // 4)) ** 2


def views(_: Config, made: Mapping[str, Any]) -> Grid:
    """How many views of a picture there are: the quarters, if it is split, and the whole."""
    return (len(made["pixel_values"][0]),)


def merged_rows_and_columns(config: Config, made: Mapping[str, Any]) -> Grid:
    """Those of tokens."""
    _, height, width = patches(config, made)
    side = merge_side(config)
    return height // side, width // side


def write_hunyuan(config: Config, grid: Grid, mark: str) -> str:
    """A token ends each row, one begins the picture, and one ends it."""
    rows, columns = grid
    return mark * (rows * (columns + 1) + 2)


def hunyuan_axes(config: Config) -> int:
    """Raises `ModelLoadError`."""
    text = config.get("text_config") or config
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    found = len(given.get("mrope_section") or given.get("xdrope_section") or ())
    if found < 3:
        raise ModelLoadError(
            f"config.json gives {found} numbers of dimensions that rotate by position (mrope_section or "
            "xdrope_section), and needs 3 at least; the model's files are incomplete"
        )
    return found


def write_idefics2(config: Config, grid: Grid, mark: str) -> str:
    shown = mark * int(config.get("perceiver_config", {}).get("resampler_n_latents", 64))
    return f"{EDGE}{shown}{EDGE}" * grid[0]


def join_idefics2(text: str) -> str:
    """One mark stands between images beside each other, and a space between one and a word."""
    return re.sub(rf"{EDGE}(?=[^\s<])", f"{EDGE} ", text.replace(EDGE * 2, EDGE))


def join_paligemma(text: str) -> str:
    """The prompt begins behind its images, and a line ends it."""
    images, text = text[: (end := text.rfind("<image>") + len("<image>"))], text[end:]
    return f"{images}<bos>{text}\n"


def prompt_length(config: Config) -> int:
    """All tokens of a prompt see each other."""
    return int(config.get("text_config", {}).get("max_position_embeddings", 8192))


def write_janus(config: Config, grid: Grid, mark: str) -> str:
    shown = write_siglip({**config, "vision_config": {**_JANUS, **tower_of(config)}}, grid, mark)
    return f"<begin_of_image>{shown}<end_of_image>"


def write_siglip(config: Config, grid: Grid, mark: str) -> str:
    tower = tower_of(config)
    return mark * (side_of(tower.get("image_size", 224)) // side_of(tower.get("patch_size", 16))) ** 2


def patches(_: Config, made: Mapping[str, Any]) -> Grid:
    time, height, width = made["image_grid_thw"][0]
    return int(time), int(height), int(width)


def merge_side(config: Config) -> int:
    return int(tower_of(config).get("spatial_merge_size", 2))


def write_patches(config: Config, grid: Grid, mark: str) -> str:
    time, height, width = grid
    return mark * (time * height * width // merge_side(config) ** 2)


def patches_and_side(config: Config, made: Mapping[str, Any]) -> Grid:
    return *patches(config, made), int(made["image_merge_sizes"][0])


def write_merged(config: Config, grid: Grid, mark: str) -> str:
    """The last number of `grid` is the side of the square of patches that make one token."""
    time, height, width, side = grid
    return mark * (time * height * width // side**2)


def sides_and_crops(_: Config, made: Mapping[str, Any]) -> Grid:
    """How wide the whole is, and each crop, and how many crops there are."""
    crops = int(made["num_local_patches"][0])
    return int(made["pixel_values"][0].shape[-1]), int(made["pixel_values_local"][0].shape[-1]) if crops else 0, crops


def write_ocr(config: Config, grid: Grid, mark: str) -> str:
    """The crops, the whole, and a token that ends them."""
    patch = 4 * side_of(tower_of(config).get("sam_config", {}).get("patch_size", 16))
    whole, crop = ((-(-side // patch)) ** 2 for side in grid[:2])
    return mark * (whole + crop * grid[2] + 1)


def rows_by_columns(_: Config, made: Mapping[str, Any]) -> Grid:
    rows, columns = made["grids"][0]
    return int(rows), int(columns)


def write_ovis(config: Config, grid: Grid, mark: str) -> str:
    """The whole, and the tiles row by row, with `OVIS_MARKS` around and between them. Raises `ModelLoadError`."""
    tower, (rows, columns) = tower_of(config), grid
    if (found := tower.get("tokenize_function", "softmax")) not in ("softmax", "st_argmax"):
        raise ModelLoadError(
            f"config.json has tokenize_function {found!r}, by which an image looks different each time"
        )
    side = side_of(tower.get("image_size", 224)) // side_of(tower.get("patch_size", 14))
    tile = mark * (-(-side // int(tower.get("hidden_stride", 1)))) ** 2
    start, whole, between, under, end = OVIS_MARKS
    tiles = under.join([between.join([tile] * columns)] * rows) if rows * columns > 1 else ""
    return f"{start}{tile}{whole}{tiles}{end}"


def ovis_marks(config: Config) -> dict[str, int]:
    return dict(zip(OVIS_MARKS, config["visual_indicator_token_ids"], strict=True))


def tile_count(_: Config, made: Mapping[str, Any]) -> Grid:
    return (int(made["num_patches"][0]),)


def write_internvl(config: Config, grid: Grid, mark: str) -> str:
    return f"<img>{mark * int(config.get('image_seq_length', 256)) * grid[0]}</img>"


def sizes(_: Config, made: Mapping[str, Any]) -> Grid:
    height, width = made["image_sizes"][0]
    return int(height), int(width)


def sizes_and_count(config: Config, made: Mapping[str, Any]) -> Grid:
    return *sizes(config, made), int(made["batch_num_images"][0])


def pixtral_patch(config: Config) -> int:
    merge = 1 if config.get("model_type") == "llava" else config.get("spatial_merge_size", 2)
    return side_of(tower_of(config).get("patch_size", 16)) * int(merge)


def write_pixtral(config: Config, grid: Grid, mark: str) -> str:
    patch = pixtral_patch(config)
    rows, columns = grid[0] // patch, grid[1] // patch
    return "[IMG_BREAK]".join([mark * columns] * rows) + "[IMG_END]"


def write_lighton(config: Config, grid: Grid, mark: str) -> str:
    patch = pixtral_patch(config)
    return mark * (grid[0] // patch * (grid[1] // patch))


def crops(_: Config, made: Mapping[str, Any]) -> Grid:
    return (int(made["num_crops"][0]),)


def write_gemma(config: Config, grid: Grid, mark: str) -> str:
    one = f"\n\n<start_of_image>{mark * gemma_tokens(config)}<end_of_image>\n\n"
    if not grid[0]:
        return one
    crops = " ".join([one] * grid[0])
    return f"Here is the original image {one} and here are some crops to help you see better {crops}"


def write_gemma3n(config: Config, grid: Grid, mark: str) -> str:
    count = int(config.get("vision_soft_tokens_per_image", 256))
    return f"\n\n<start_of_image>{mark * count}<end_of_image>\n\n"


def gemma_tokens(config: Config) -> int:
    return int(config.get("mm_tokens_per_image", 256))


def soft_tokens(_: Config, made: Mapping[str, Any]) -> Grid:
    return (int(made["num_soft_tokens_per_image"][0]),)


def mutual_soft_tokens(config: Config) -> int:
    """E2B and E4B see images causally."""
    default = "vision" if config.get("model_type") == "gemma4_unified" else None
    found = config.get("text_config", {}).get("use_bidirectional_attention", default)
    return BUDGETS[-1] if found == "vision" else 0


def gemma4_settings(config: Config) -> dict[str, Any]:
    names = ("patch_size", "pooling_kernel_size")
    own = {name: tower_of(config)[name] for name in names if name in tower_of(config)}
    return {"image_processor_type": "Gemma4ImageProcessor", **own}
