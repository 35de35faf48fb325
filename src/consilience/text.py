"""Text of others, made fit to be shown: nothing in it is unseen, and it stands apart from ours."""

import re
import unicodedata

# Printable by the standard, and without ink in most typefaces: fillers, blanks, and marks that only
# choose how the letter before them is drawn.
_INKLESS = frozenset(
    map(
        chr,
        (
            *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0, 0xFFFC),
            *(*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), 0x13441, 0x13442, 0x16FE4, 0x1D159),
            *range(0xE0100, 0xE01F0),
        ),
    )
)
MOST_MARKS = 2  # on one letter; more of them reach into other lines


class Quoted(str):
    """Text that others wrote, for a page, which sets it off from what this package says."""


def printable(text: str, *, lines: bool = False) -> str:
    """Return text in which every character can be seen; with `lines`, line breaks stay.

    Studies, files and hubs bring text that their authors chose. Escape codes in it could hide lines
    on a terminal, characters that turn the direction of writing could disguise what a page says,
    and characters without ink could stand for an empty line. Such characters are shown by their
    number; other white space becomes a space.
    """
    out, marks = [], 0
    for each in text:
        marks = marks + 1 if unicodedata.combining(each) else 0
        seen = each.isprintable() and each not in _INKLESS and marks <= MOST_MARKS
        out.append(each if seen or (lines and each == "\n") else _visible(each))
    return "".join(out)


def _visible(character: str) -> str:
    return " " if character.isspace() else f"\\u{{{ord(character):x}}}"


def collapse(text: str) -> str:
    """Return printable text in one line, in which no run of spaces stands for a line break."""
    return " ".join(printable(text).split())


def quote(text: object, most: int = 300) -> str:
    """Return another's words for the middle of a sentence: in quotation marks, in one line, short.

    Quotation marks within them become apostrophes, so that they cannot end the quotation.
    """
    shown = collapse(str(text)[: 4 * most])
    shown = shown if len(shown) <= most and len(str(text)) <= 4 * most else f"{shown[:most]} […]"
    return f"“{_MARKS.sub(chr(39), shown)}”"


# Whatever people take for a quotation mark, and two apostrophes, which look like one.
_MARKS = re.compile("[“”„‟\"«»❝❞❠〝〞〟＂″‴‶‷⁗ˮ״ʺ˝]|['’‘‚‛′ʹʼ‵❛❜＇`´]{2,}")
