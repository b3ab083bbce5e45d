"""Where in the database a secret can be read: as it is, or only written otherwise, which hides nothing."""

from __future__ import annotations

import base64
from urllib.parse import quote

from django.db import connection

KEEPS = 4  # characters at either end of a text in base64 that depend on what stands beside it


def spellings(secret: str) -> set[str]:
    """In small letters: of base64 and hexadecimal, what of it every reader would find."""
    raw = secret.encode()
    found = {secret, secret[::-1], raw.hex(), quote(secret), secret.encode("utf-16-le").hex()}
    for before in range(3):
        text = base64.b64encode(b"\0" * before + raw).decode().rstrip("=")[KEEPS if before else 0 : -KEEPS]
        found |= {text, text.replace("+", "-").replace("/", "_")}
    found.add(base64.b32encode(raw).decode().rstrip("=")[: -2 * KEEPS])
    return {text.lower() for text in found}


def tables_that_tell(secret: str) -> list[str]:
    """Names of the tables, of all that there are."""
    assert len(secret) >= 3 * KEEPS, "what is shorter is found by chance"
    wanted, found = spellings(secret), []
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names():
            cursor.execute(f'SELECT * FROM "{table}"')
            told = "\n".join(_text(cell) for row in cursor.fetchall() for cell in row).lower()
            if any(text in told for text in wanted):
                found.append(table)
    return found


def _text(cell: object) -> str:
    """Bytes as they would be read, and their hexadecimal digits."""
    if isinstance(cell, bytes | memoryview):
        return f"{bytes(cell).decode('latin-1')}\n{bytes(cell).hex()}"
    return str(cell)
