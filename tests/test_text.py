import pytest

from consilience.text import printable, quote


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
