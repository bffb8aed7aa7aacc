"""Render a laid-out picture as PNG, with Pillow."""

import io
from functools import cache
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from gpipe_hpc.visualize.colours import IDLE, MEMORY, MUTED, PAGE, RULE
from gpipe_hpc.visualize.scene import (
    MARK_HEIGHT,
    Axis,
    PictureRow,
    Rect,
    Scene,
    Strip,
    TextLine,
    ink_of,
    label_fits,
)

# Dots per layout pixel, for high-density screens and print.
_DOTS: Final = 2
_ANCHORS: Final = {"start": "ls", "middle": "ms", "end": "rs"}


def render_png(scene: Scene) -> bytes:
    """Return a scene as the bytes of a PNG file, with two dots per layout pixel."""
    image = Image.new("RGB", (round(scene.width * _DOTS), round(scene.height * _DOTS)), PAGE)
    pen = _Pen(ImageDraw.Draw(image))
    for each in scene.fixed:
        if isinstance(each, TextLine):
            pen.text(each)
        else:
            pen.rect(each)
    for section in scene.sections:
        for row in section.rows:
            _draw_row(pen, scene, row)
        for strip in section.strips:
            _draw_strip(pen, scene, strip)
        for axis in section.axes:
            _draw_axis(pen, scene, axis)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


class _Pen:
    """Drawing functions in layout pixels."""

    def __init__(self, draw: ImageDraw.ImageDraw) -> None:
        self._draw = draw

    def rect(self, rect: Rect) -> None:
        left, top = round(rect.x * _DOTS), round(rect.y * _DOTS)
        right = max(left + 1, round((rect.x + rect.width) * _DOTS))
        bottom = max(top + 1, round((rect.y + rect.height) * _DOTS))
        # Pillow's rectangles include their last row and column.
        self._draw.rectangle((left, top, right - 1, bottom - 1), fill=rect.fill)

    def text(self, text: TextLine) -> None:
        # Pillow's default font has a single weight; a stroke makes it bold.
        stroke = 0.3 if text.bold else 0
        self._draw.text(
            (text.x * _DOTS, text.y * _DOTS),
            text.text,
            fill=text.ink,
            font=_font(text.size),
            anchor=_ANCHORS[text.anchor],
            stroke_width=stroke,
        )


@cache
def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * _DOTS)


def _draw_row(pen: _Pen, scene: Scene, row: PictureRow) -> None:
    pen.rect(Rect(scene.x(0), row.y, row.span * scene.scale, row.height, IDLE))
    for box in row.boxes:
        left, width = scene.x(box.start), box.duration * scene.scale
        # Separate boxes by a gap of one dot, unless the box is hardly wider than that.
        gap = 0.5 if width >= 3 else 0.0
        pen.rect(Rect(left, row.y, width - gap, row.height, box.fill))
        if gap:
            pen.rect(Rect(left + width - gap, row.y, gap, row.height, PAGE))
        if label_fits(box.label, row.label_size, width):
            middle = left + width / 2
            base = row.y + row.height / 2 + row.label_size * 0.36
            pen.text(TextLine(middle, base, box.label, row.label_size, "middle", ink=ink_of(box)))
    for mark in row.marks:
        left, width = scene.x(mark.start), mark.duration * scene.scale
        pen.rect(Rect(left, row.mark_y, max(0.5, width - 0.5), MARK_HEIGHT, mark.fill))


def _draw_strip(pen: _Pen, scene: Scene, strip: Strip) -> None:
    base = strip.y + strip.height
    pen.rect(Rect(scene.x(0), base, strip.span * scene.scale, 0.5, RULE))
    ends = [*(step.time_s for step in strip.steps[1:]), strip.span]
    for step, end in zip(strip.steps, ends, strict=bool(strip.steps)):
        if step.live:
            left, height = scene.x(step.time_s), strip.height * step.live / strip.full
            pen.rect(Rect(left, base - height, scene.x(end) - left, height, MEMORY))


def _draw_axis(pen: _Pen, scene: Scene, axis: Axis) -> None:
    pen.rect(Rect(scene.x(0), axis.y, axis.span * scene.scale, 0.5, MUTED))
    for tick in scene.ticks():
        if tick <= axis.span * 1.000001:
            x = scene.x(tick)
            pen.rect(Rect(x, axis.y, 0.5, 4, MUTED))
            pen.text(TextLine(x, axis.y + 16, f"{tick:.6g}", 11, "middle", ink=MUTED))
