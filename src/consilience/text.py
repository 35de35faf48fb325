"""Text of others, made fit to be shown: it can neither move the cursor nor reverse a line."""


def printable(text: str, *, lines: bool = False) -> str:
    """Return text in which every character can be seen; with `lines`, line breaks stay.

    Studies, files and hubs bring text that their authors chose. Escape codes in it could hide lines
    on a terminal, and characters that turn the direction of writing could disguise what a page
    says. Such characters are shown by their number; other white space becomes a space.
    """
    return "".join(
        each if each.isprintable() or (lines and each == "\n") else _visible(each) for each in text
    )


def _visible(character: str) -> str:
    return " " if character.isspace() else f"\\u{{{ord(character):x}}}"
