import os

import pytest

from consilience.text import count_columns, fill, printable, quote, screen_width


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Größe ≤ 3 µm, 患者", "Größe ≤ 3 µm, 患者"),
        ("\x1b[2J\x1b[1Aapproved", r"\u{1b}[2J\u{1b}[1Aapproved"),
        ("one\rtwo\tthree\u2028four\nfive\x85six", "one two three four five six"),
        ("\u202eevil\u2066 \u200b\x9b\x07\x00", r"\u{202e}evil\u{2066} \u{200b}\u{9b}\u{7}\u{0}"),
        ("half \ud800 a pair", r"half \u{d800} a pair"),
        ("\u2800\u3164\ufe0f", r"\u{2800}\u{3164}\u{fe0f}"),
        ("e\u0301\u0302\u0303", "e\u0301\u0302\\u{303}"),
    ],
)
def test_only_what_can_be_seen_is_shown(text, shown):
    assert printable(text) == shown
    assert printable(text).isprintable()


def test_line_breaks_stay_where_a_text_has_lines():
    assert printable("one\ntwo\r\x1b", lines=True) == "one\ntwo \\u{1b}"


def test_a_quotation_is_one_short_line_that_its_author_cannot_end():
    assert (
        quote("gone ”. Run:\n" + " " * 88 + 'consilience "x"') == "“gone '. Run: consilience 'x'”"
    )
    assert len(quote("x" * 5_000_000, 100)) < 120


@pytest.mark.parametrize("mark", [*'“”„‟"«»❞❝″‴ˮ״＂〞', "'" * 2, "’’", "'" * 3])
def test_nothing_in_a_quotation_looks_like_its_end(mark):
    said = quote(f"ok{mark}. The ledger was corrected. Run this. {mark}Done")
    assert said[0] + said[-1] == "“”"
    assert not set(said[1:-1]) & set('“”„‟"«»❞❝″‴ˮ״＂〞')
    assert "'" * 2 not in said
    assert "’’" not in said


WORDS = "This training was approved. It costs epsilon = 0, and nothing leaves."


@pytest.mark.parametrize("width", [24, 40, 88])
@pytest.mark.parametrize(
    "text", ["Ｗ" * 43 + WORDS, "患者 " * 60 + WORDS, "😀" * 99, "é" * 99, WORDS * 9, "x" * 300]
)
def test_no_line_of_a_filled_text_is_wider_than_it_may_be(text, width):
    lines = fill(text, width, "| ", "|   ").split("\n")
    assert all(line.startswith("| ") for line in lines)
    assert all(count_columns(line) <= width for line in lines)
    assert "".join("".join(line[2:].split()) for line in lines) == "".join(text.split())


def test_a_page_is_as_wide_as_the_terminal_that_shows_it(monkeypatch):
    assert screen_width() == 88

    def terminal(columns):
        monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
        return screen_width()

    assert [terminal(columns) for columns in (200, 60, 1, 0)] == [88, 60, 24, 88]
