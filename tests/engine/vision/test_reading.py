"""Images that strangers send."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image
from vision_models import animation, damaged, enormous, picture

from penstock.engine.text.chat_messages import normalise
from penstock.engine.vision.chat import LOW, given_images, image_parts, marked, read_data_url, without_images
from penstock.engine.vision.reading import ANY, ImageLimits, check_image, decode_image, within
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.openai.chat import ChatMessage

PARTS = "{% for part in message.content %}{{ part.type }}{% endfor %}"
STRINGS = "{{ message.content }}"


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def message(*parts: dict[str, Any], role: str = "user") -> ChatMessage:
    return ChatMessage.model_validate({"role": role, "content": list(parts)})


def image(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data), **more}}


def in_memory(save: Callable[[io.BytesIO], None]) -> bytes:
    file = io.BytesIO()
    save(file)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_every_format_is_read(kind: str) -> None:
    data = picture(30, 20, kind=kind)
    assert check_image(data, ANY, "here") == (30, 20)
    found = decode_image(data, ANY, "here")
    assert (found.mode, found.size) == ("RGB", (30, 20))


def in_scans(more: int, before: bytes = b"") -> bytes:
    """A progressive JPEG whose last scan comes `more` times, each with these bytes `before` it."""
    file = io.BytesIO()
    Image.new("L", (64, 64)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    return data[:-2] + (before + data[data.rindex(b"\xff\xda") : -2]) * more + data[-2:]


def test_a_progressive_jpeg_is_read_whatever_its_other_segments_say() -> None:
    scans = b"\xff\xfe" + (2 + 2 * 500).to_bytes(2, "big") + b"\xff\xda" * 500  # a comment
    data = in_scans(2)
    assert decode_image(data[:2] + scans + data[2:], ANY, "here").size == (64, 64)


@pytest.mark.parametrize(
    ("data", "says", "code"),
    [
        (in_scans(200), "more than 100 scans", "invalid_image"),
        (in_scans(200, before=b"\xff\x01"), "more than 100 scans", "invalid_image"),
        (enormous(9_000, 9_000), "has 9000 x 9000 pixels, and 40000000 are allowed", "image_size"),
        (enormous(10_000, 10_000), "pixels", "image_size"),
        (enormous(60_000, 60_000), "pixels", "image_size"),
        (enormous(70_000, 9), "has 70000 x 9 pixels", "image_size"),
        (picture(1, 1), "has 1 x 1 pixels, and each side needs 8", "image_size"),
        (picture(500, 3), "has 500 x 3 pixels", "image_size"),
        (animation(), "is animated", "invalid_image"),
        (b"<svg/>", "no PNG, JPEG, WebP or GIF", "invalid_image"),
        (in_memory(lambda file: Image.new("RGB", (20, 20)).save(file, "BMP")), "no PNG", "invalid_image"),
        (b"", "no PNG", "invalid_image"),
    ],
    ids=range(12),
)
def test_bad_ones_are_refused_by_their_headers(data: bytes, says: str, code: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        check_image(data, ANY, "messages[0]")
    assert (caught.value.code, caught.value.param) == (code, "messages[0]")


def test_a_damaged_one_is_refused_when_it_is_decoded() -> None:
    assert check_image(damaged(), ANY, "here") == (60, 40)
    with pytest.raises(InvalidRequest, match="here: the image is damaged"):
        decode_image(damaged(), ANY, "here")


def test_a_small_file_with_a_long_text_is_no_bomb() -> None:
    from PIL import PngImagePlugin

    about = PngImagePlugin.PngInfo()
    about.add_text("note", "x" * (80 << 20), zip=True)
    data = in_memory(lambda file: Image.new("RGB", (16, 16)).save(file, "PNG", pnginfo=about))
    assert len(data) < 200_000
    with pytest.raises(InvalidRequest, match="damaged"):
        check_image(data, ANY, "here")


def test_pictures_stand_upright_and_on_white() -> None:
    turned = Image.new("RGB", (20, 10), "red")
    exif = turned.getexif()
    exif[0x0112] = 6  # the camera was turned
    assert decode_image(in_memory(lambda file: turned.save(file, "JPEG", exif=exif)), ANY, "here").size == (10, 20)
    clear = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    assert decode_image(in_memory(lambda file: clear.save(file, "PNG")), ANY, "here").getpixel((3, 3)) == (
        255,
        255,
        255,
    )


@pytest.mark.parametrize(
    ("limits", "size"),
    [
        (ANY, (40, 20)),
        (ImageLimits(most=200), (20, 10)),
        (ImageLimits(fewest=3200), (80, 40)),
        (ImageLimits(9, 1, 800), (40, 20)),
    ],
)
def test_pixels_are_kept_within(limits: ImageLimits, size: tuple[int, int]) -> None:
    assert within(Image.new("RGB", (40, 20)), limits).size == size


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("data:image/png,AAAA", "not in base64"),
        ("data:image/png;charset=x,AAAA", "not in base64"),
        ("data:image/png;base64,AAA", "not valid base64"),
        ("data:image/png;base64,A A=", "not valid base64"),
        ("data:image/png;base64,", "is empty"),
        ("data:" + "x" * 1000, "no data: URL"),
        ("file:///etc/passwd", "no data: URL"),
        ("HTTPS://example.org/a.png", "not fetched"),
    ],
)
def test_urls_that_hold_no_image_are_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_data_url(text, "here")


def test_a_data_url_gives_its_bytes_and_type() -> None:
    assert read_data_url("data:image/PNG;name=a;base64,aGk=", "here") == (b"hi", "image/png")
    assert read_data_url("data:;base64,aGk=", "here") == (b"hi", None)


def test_only_a_user_sends_images_and_not_too_many() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[1\]: a message with the role assistant"):
        image_parts([message({"type": "text", "text": "x"}, image(picture()), role="assistant")])
    with pytest.raises(InvalidRequest, match="65 images; send at most 64"):
        image_parts([message(*[image(picture())] * 65)])


def test_less_detail_is_fewer_pixels() -> None:
    chat = [message(image(picture(), detail="low"), image(picture(), detail="high"))]
    assert [one.limits.most for one in given_images(chat, ANY)] == [LOW, None]
    assert [one.limits.most for one in given_images(chat, ImageLimits(most=99))] == [99, 99]


def test_what_was_fetched_is_checked_as_well() -> None:
    far = "https://example.org/a"
    chat = [message({"type": "image_url", "image_url": {"url": far}})]
    assert given_images(chat, ANY, {far: picture()})[0].data == picture()
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\].image_url.url: the image is animated"):
        given_images(chat, ANY, {far: animation()})


def test_an_uploaded_image_is_known_by_its_id_alone() -> None:
    chat = [message({"type": "image_url", "image_url": {"file_id": "file-1", "detail": "low"}})]
    (found,) = given_images(chat, ANY, {"file-1": picture()})
    assert (found.data, found.limits.most) == (picture(), LOW)
    with pytest.raises(InvalidRequest, match="uploaded files are not known here; send a data: URL") as caught:
        given_images(chat, ANY)
    assert caught.value.param == "messages[0].content[0].image_url.file_id"
    with pytest.raises(InvalidRequest, match="no data: URL"):
        given_images([message({"type": "image_url", "image_url": {"url": "file-1"}})], ANY, {"file-1": picture()})


def test_a_template_gets_marks_and_no_data() -> None:
    content = [{"type": "text", "text": "one"}, image(picture()), {"type": "text", "text": "two"}]
    parts = marked(content, PARTS, "<image>")
    assert parts == [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]
    assert marked(content, STRINGS, "<image>") == "one\n<image>\ntwo"
    (kept,) = normalise([{"role": "user", "content": parts}], PARTS)
    assert kept["content"] == parts


def test_a_body_travels_without_its_images() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}, message(image(b"long")).model_dump()], "seed": 1}
    lean = without_images(body)
    assert lean["messages"][1]["content"] == [{"type": "image_url", "image_url": {"url": ""}}]
    assert lean["messages"][0] == body["messages"][0] and lean["seed"] == 1  # type: ignore[index]
