"""What serve_moe.py needs of HTTP/1.1: one request per connection, bounded in size and time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

MOST_HEAD, MOST_BODY = 16384, 65536
READ_S, WRITE_S = 10.0, 30.0
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed",
           408: "Request Timeout", 411: "Length Required", 413: "Content Too Large",
           431: "Request Header Fields Too Large", 501: "Not Implemented",
           503: "Service Unavailable", 500: "Internal Server Error"}  # fmt: skip


class Refused(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


async def read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    """Method, path and body of one HTTP/1 request.

    Raises:
        Refused: it is malformed, too large or too slow.
        ConnectionError: there is none.
    """
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), READ_S)
        method, path, length = parse_head(head.decode("latin-1"))
        return method, path, await asyncio.wait_for(reader.readexactly(length), READ_S)
    except asyncio.TimeoutError:
        raise Refused(408, f"the request did not arrive in {READ_S:g} s") from None
    except asyncio.LimitOverrunError:
        raise Refused(431, f"the headers have more than {MOST_HEAD} bytes") from None
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the client closed the connection early") from error


def parse_head(head: str) -> tuple[str, str, int]:
    """Method, path and length of the body."""
    first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Refused(400, f"{first[:80]!r} is no HTTP/1 request line")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        again = name == "content-length" and name in headers
        if not colon or not name or name != name.strip() or again:
            raise Refused(400, f"{line[:80]!r} is no header, or repeats Content-Length")
        headers[name] = value.strip()
    if "transfer-encoding" in headers:
        raise Refused(501, "Transfer-Encoding is not supported: send Content-Length")
    length = headers.get("content-length", "0" if words[0] != "POST" else "")
    if not length:
        raise Refused(411, "a POST needs Content-Length")
    if not (length.isascii() and length.isdigit()):
        raise Refused(400, f"Content-Length {length[:20]!r} is no number")
    if len(length) > 9 or int(length) > MOST_BODY:
        raise Refused(413, f"the body has more than {MOST_BODY} bytes")
    return words[0], words[1].partition("?")[0], int(length)


async def send_event(writer: asyncio.StreamWriter, fields: dict[str, Any]) -> None:
    await flush(writer, f"data: {json.dumps(fields)}\n\n".encode())


async def send_json(
    writer: asyncio.StreamWriter, status: int, fields: Any, headers: dict[str, str] | None = None
) -> None:
    await send(writer, status, json.dumps(fields).encode() + b"\n", "application/json", headers)


async def send(
    writer: asyncio.StreamWriter,
    status: int,
    body: bytes,
    kind: str,
    headers: dict[str, str] | None = None,
) -> None:
    """Writes a whole answer."""
    length = {"Content-Length": str(len(body)), **(headers or {})}
    await flush(writer, head_of(status, kind, length) + body)


def head_of(status: int, kind: str, headers: dict[str, str]) -> bytes:
    """The head of an answer after which the connection is closed."""
    lines = [f"HTTP/1.1 {status} {REASONS[status]}", f"Content-Type: {kind}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def flush(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Writes ``data``; a client that reads too slowly raises TimeoutError."""
    writer.write(data)
    await asyncio.wait_for(writer.drain(), WRITE_S)
