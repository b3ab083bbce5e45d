"""Search of all database tables for a secret, as plain text or in a reversible encoding."""

from __future__ import annotations

import base64
from urllib.parse import quote

from django.db import connection

CONTEXT_CHARS = 4  # characters at each end of a base64 text that depend on the adjacent bytes


def list_encodings(secret: str) -> set[str]:
    """Return the encodings of a secret in lower case, without the parts that depend on adjacent bytes."""
    raw = secret.encode()
    found = {secret, secret[::-1], raw.hex(), quote(secret), secret.encode("utf-16-le").hex()}
    for before in range(3):
        text = (
            base64.b64encode(b"\0" * before + raw).decode().rstrip("=")[CONTEXT_CHARS if before else 0 : -CONTEXT_CHARS]
        )
        found |= {text, text.replace("+", "-").replace("/", "_")}
    found.add(base64.b32encode(raw).decode().rstrip("=")[: -2 * CONTEXT_CHARS])
    return {text.lower() for text in found}


def find_tables_with(secret: str) -> list[str]:
    """Return the names of the tables that contain a secret in any encoding."""
    assert len(secret) >= 3 * CONTEXT_CHARS, "a shorter secret would be found by chance"
    encodings, found = list_encodings(secret), []
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names():
            cursor.execute(f'SELECT * FROM "{table}"')
            cells = "\n".join(_text(cell) for row in cursor.fetchall() for cell in row).lower()
            if any(text in cells for text in encodings):
                found.append(table)
    return found


def _text(cell: object) -> str:
    """Return the text of a cell, and also the hexadecimal digits of bytes."""
    if isinstance(cell, bytes | memoryview):
        return f"{bytes(cell).decode('latin-1')}\n{bytes(cell).hex()}"
    return str(cell)
