"""Text of others, made fit to be shown: nothing in it is unseen, and it stands apart from ours."""

import os
import re
import textwrap
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


PAGE_WIDTH, LEAST_WIDTH = 88, 24  # columns of a page, and of the narrowest terminal that is served
_SPARE = "\ufdd0"  # stands for the second column of a character; `printable` leaves none


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


def count_columns(text: str) -> int:
    """Return how many columns of a terminal text takes at most, whatever typeface it has."""
    return sum(1 if _is_narrow(each) else 2 for each in text)


def _is_narrow(character: str) -> bool:
    """Tell whether every terminal gives a character one column.

    Some have two for whatever lies beyond the alphabets, and where a character is Ambiguous.
    """
    if character < "\x7f":
        return True
    return character < "\u1100" and unicodedata.east_asian_width(character) in ("N", "Na")


def fill(text: str, width: int, first: str = "", later: str | None = None) -> str:
    """Return printable text in lines of at most so many columns, each begun by `first` or `later`.

    No line is so wide that a terminal of this width would break it again.
    """
    later = first if later is None else later
    stretched, begin, go_on = (
        "".join(each if _is_narrow(each) else each + _SPARE for each in one)
        for one in (text, first, later)
    )
    # A long word may be broken between a character and its spare column.
    width -= stretched != text
    filled = textwrap.fill(stretched, width, initial_indent=begin, subsequent_indent=go_on)
    return (filled or first).replace(_SPARE, "")


def screen_width() -> int:
    """Return the width of a page on this terminal, or everywhere else."""
    for stream in (1, 2):  # what is written to the other one may be kept in a file
        try:
            columns = os.get_terminal_size(stream).columns
        except OSError:
            continue
        if columns > 0:
            return min(PAGE_WIDTH, max(LEAST_WIDTH, columns))
    return PAGE_WIDTH


def collapse(text: str) -> str:
    """Return printable text in one line, in which no run of spaces stands for a line break."""
    return " ".join(printable(text).split())


def shorten(text: str, most: int = 300) -> str:
    """Return printable text in one line of at most so many characters, and a mark if it is cut."""
    shown = collapse(text[: 4 * most])
    return shown if len(shown) <= most and len(text) <= 4 * most else f"{shown[:most]} […]"


def quote(text: object, most: int = 300) -> str:
    """Return another's words for the middle of a sentence: in quotation marks, in one line, short.

    Quotation marks within them become apostrophes, so that they cannot end the quotation.
    """
    return f"“{_MARKS.sub(chr(39), shorten(str(text), most))}”"


# Whatever people take for a quotation mark, and two apostrophes, which look like one.
_MARKS = re.compile("[“”„‟\"«»❝❞❠〝〞〟＂″‴‶‷⁗ˮ״ʺ˝]|['’‘‚‛′ʹʼ‵❛❜＇`´]{2,}")
