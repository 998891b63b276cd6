"""Panels, titles and legends of a picture, set beside and below each other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

GAP_PIXELS = 4  # between panels
_TEXT_PIXELS = 12  # height of the font
_BLOCK_PIXELS = 10  # side of the block of colour before a word of the legend


@dataclass(frozen=True)
class Word:
    """A word on a line of text.

    Args:
        text: may hold blanks.
        block_colour: of a block before the word; None: no block.
        left: where it begins, in pixels.
    """

    text: str
    block_colour: str | None
    left: int

    @property
    def width(self) -> int:
        """In pixels, with its block."""
        return _word_width(self.text, self.block_colour)


def title_line(titles: Sequence[str], page_width: int) -> np.ndarray:
    column_width = (page_width + GAP_PIXELS) / len(titles)
    words = []
    for column, title in enumerate(titles):
        words.append(Word(title, block_colour=None, left=round(column * column_width)))
    return text_line(words)


def text_line(words: Sequence[Word]) -> np.ndarray:
    """A line of white text on black. Shape: (height, width, 3)."""
    width = max(word.left + word.width for word in words)
    line = Image.new("RGB", (width, _TEXT_PIXELS + 4))
    pen = ImageDraw.Draw(line)
    font = ImageFont.load_default(_TEXT_PIXELS)
    for word in words:
        left = word.left
        if word.block_colour is not None:
            block = (left, 3, left + _BLOCK_PIXELS - 1, 2 + _BLOCK_PIXELS)
            pen.rectangle(block, word.block_colour)
            left += _BLOCK_PIXELS + GAP_PIXELS
        pen.text((left, 1), word.text, "white", font)
    return np.asarray(line)


def wrapped(legend: Sequence[tuple[str, str]], max_width: int) -> list[list[Word]]:
    """Names and their colours, broken into lines of at most so many pixels, if no name is longer."""
    lines: list[list[Word]] = []
    left = max_width  # so that the first name begins a line
    for name, block_colour in legend:
        width = _word_width(name, block_colour)
        if left + width > max_width:
            lines.append([])
            left = 0
        lines[-1].append(Word(name, block_colour, left))
        left += width + _TEXT_PIXELS
    return lines


def _word_width(text: str, block_colour: str | None) -> int:
    block_width = 0 if block_colour is None else _BLOCK_PIXELS + GAP_PIXELS
    font = ImageFont.load_default(_TEXT_PIXELS)
    return block_width + math.ceil(font.getlength(text)) + 1


def stacked(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Pictures below each other, padded by black on the right."""
    width = max(row.shape[1] for row in rows)
    padded_rows = []
    for row in rows:
        missing = width - row.shape[1]
        padded_rows.append(np.pad(row, ((0, 0), (0, missing), (0, 0))))
    return _joined(padded_rows, 0)


def grid(rows: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Rows of panels in columns of one width; narrower panels are in the middle of theirs."""
    width = max(panel.shape[1] for row in rows for panel in row)
    return stacked([_joined([_centred(panel, width) for panel in row], 1) for row in rows])


def _centred(panel: np.ndarray, width: int) -> np.ndarray:
    left = (width - panel.shape[1]) // 2
    right = width - panel.shape[1] - left
    return np.pad(panel, ((0, 0), (left, right), (0, 0)))


def _joined(panels: Sequence[np.ndarray], axis: int) -> np.ndarray:
    gap_shape = list(panels[0].shape)
    gap_shape[axis] = GAP_PIXELS
    pieces = [panels[0]]
    for panel in panels[1:]:
        pieces += [np.zeros(gap_shape, np.uint8), panel]
    return np.concatenate(pieces, axis).astype(np.uint8)
