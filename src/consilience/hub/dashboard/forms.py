"""What browsers send: the fields of a form, and a file that is too large for memory."""

from __future__ import annotations

import re
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from pathlib import Path
from urllib.parse import parse_qsl

from fastapi import Request

from consilience.protocol import Refusal

_START = 2048  # bytes; they contain a form's token and the name of its file


def read_form(request: Request, content: bytes) -> dict[str, str]:
    """Return the fields of a form; a file becomes its text."""
    kind = request.headers.get("content-type", "")
    if kind.startswith("multipart/form-data"):
        try:
            head = f"Content-Type: {kind}\r\n\r\n".encode("latin-1")
            parts = BytesParser(policy=HTTP).parsebytes(head + content).iter_parts()
            return {
                str(part.get_param("name", "", "content-disposition")): _text(part)
                for part in parts
            }
        except (ValueError, TypeError, AttributeError, KeyError, IndexError):
            raise Refusal("malformed", "The form cannot be read.") from None
    try:
        return dict(parse_qsl(content.decode(), keep_blank_values=True, max_num_fields=50))
    except ValueError:
        raise Refusal("malformed", "The form cannot be read.") from None


def _text(part: Message) -> str:
    content = part.get_payload(decode=True)
    return content.decode(errors="replace") if isinstance(content, bytes) else ""


def read_beginning(arrived: Path) -> bytes:
    """Return the beginning of a form: its token comes before its file."""
    with arrived.open("rb") as file:
        return file.read(_START)


def file_within(arrived: Path, kind: str) -> tuple[int, int]:
    """Return where the last part of a form begins and ends."""
    boundary = re.search(r'boundary="?([A-Za-z0-9\'()+_,./:=?-]{1,70})"?', kind)
    mark = b"--" + boundary.group(1).encode() if boundary else b""
    with arrived.open("rb") as file:
        start, size = file.read(_START), arrived.stat().st_size
        file.seek(max(0, size - 100))
        rest = file.read()
    head = start.find(b'name="file"')
    begin, end = start.find(b"\r\n\r\n", head) + 4, rest.rfind(b"\r\n" + mark + b"--")
    if not mark or head < 0 or begin < 4 or end < 0:
        raise Refusal("malformed", "The form contains no file.")
    return begin, size - len(rest) + end
