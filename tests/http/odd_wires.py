"""Odd ways to say a request: encodings of a body that are almost JSON, and deliveries that are almost HTTP."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from tests.http.odd_requests import BASES, STREAMED, bodies, one_in
from tests.http_service import MODEL

Body = dict[str, Any]


@dataclass(frozen=True)
class Odd:
    """A request as it goes over the wire.

    ``wild`` ones may not even be HTTP, so that the answer may be none, or one of the HTTP server's own.
    """

    path: str
    pieces: tuple[bytes, ...]
    leaves: bool = False
    cut: bool = False
    wild: bool = False


# ------------------------------------------------------------ bodies


def _nested(body: Body, opening: str, closing: str, depth: int) -> bytes:
    inner = opening * depth + "1" + closing * depth
    return (json.dumps(body)[:-1] + f', "metadata": {inner}}}').encode()


def _twice(body: Body) -> bytes:
    text = json.dumps(body)
    return (text[:-1] + ", " + text[1:]).encode()


def _with(body: Body, text: str) -> bytes:
    """The body with members that `json` would not write."""
    return (json.dumps(body)[:-1] + ", " + text + "}").encode("utf-8", "surrogatepass")


ENCODINGS: dict[str, Callable[[Body], bytes]] = {
    "as it is": lambda body: json.dumps(body).encode(),
    "not escaped": lambda body: json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"),
    "utf-16": lambda body: json.dumps(body).encode("utf-16"),
    "utf-32": lambda body: json.dumps(body).encode("utf-32-le"),
    "latin-1": lambda body: json.dumps({**body, "user": "é"}, ensure_ascii=False).encode("latin-1", "replace"),
    "byte order mark": lambda body: b"\xef\xbb\xbf" + json.dumps(body).encode(),
    "gzip": lambda body: gzip.compress(json.dumps(body).encode()),
    "every key twice": _twice,
    "deep lists": lambda body: _nested(body, "[", "]", 50_000),
    "deep objects": lambda body: _nested(body, '{"a":', "}", 50_000),
    "just too deep": lambda body: _nested(body, "[", "]", 1000),
    "an endless number": lambda body: _with(body, '"seed": ' + "9" * 5000),
    "a number out of reach": lambda body: _with(body, '"temperature": 1e99999, "top_p": -1e-99999'),
    "digits without end": lambda body: _with(body, '"temperature": 0.' + "3" * 5000),
    "no number": lambda body: _with(body, '"temperature": NaN'),
    "infinity": lambda body: _with(body, '"presence_penalty": -Infinity'),
    "a raw surrogate": lambda body: _with(body, '"stop": "\ud800"'),
    "half a pair": lambda body: _with(body, '"stop": "\\ud83d"'),
    "a pair the wrong way": lambda body: _with(body, '"prompt": "\\udc00\\ud800"'),
    "no character": lambda body: _with(body, '"prompt": "\\u0000\\uffff\\ufffe"'),
    "a control character": lambda body: _with(body, '"prompt": "\x01\x7f"'),
    "an overlong form": lambda body: _with(body, '"prompt": "x"').replace(b'"x"', b'"\xc0\xaf\xed\xa0\x80\xf5"'),
    "joined characters": lambda body: _with(body, '"prompt": "' + "e" + "\u0301" * 60 + '"'),
    "from right to left": lambda body: _with(body, '"prompt": "\u202e\u2066\u200d\ufeff"'),
    "a wide object": lambda body: json.dumps({**body, "metadata": {str(i): i for i in range(5000)}}).encode(),
    "many unknown fields": lambda body: json.dumps({**body, **{f"f{i}": i for i in range(2000)}}).encode(),
    "a huge name": lambda body: json.dumps({**body, "k" * 100_000: 1}).encode(),
    "a huge text": lambda body: json.dumps({**body, "user": "u" * 300_000}).encode(),
    "half of it": lambda body: json.dumps(body).encode()[: len(json.dumps(body)) // 2],
    "more behind it": lambda body: json.dumps(body).encode() + b"{}",
    "zeros behind it": lambda body: json.dumps(body).encode() + b"\x00" * 9,
    "single quotes": lambda body: repr(body).encode("utf-8", "replace"),
    "a comment": lambda body: b"/* x */" + json.dumps(body).encode(),
    "a comma too many": lambda body: json.dumps(body).encode()[:-1] + b",}",
    "in a list": lambda body: json.dumps([body]).encode(),
    "as a text": lambda body: json.dumps(json.dumps(body)).encode(),
    "a form": lambda body: b"model=tiny&prompt=a%00b&n=1",
    "null": lambda body: b"null",
    "a number": lambda body: b"1",
    "nothing": lambda body: b"",
    "white space": lambda body: b" \r\n\t" * 100,
}

# ------------------------------------------------------------ heads

METHODS = ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "post", "BREW", "PROPFIND", "CONNECT"]
TYPES = [
    "application/json; charset=utf-8",
    "application/json; charset=utf-16",
    "APPLICATION/JSON",
    "application/merge-patch+json",
    "text/plain",
    "multipart/form-data; boundary=x",
    "application/x-www-form-urlencoded",
    "application/octet-stream",
    "",
    ";",
    "json",
    "a" * 4000,
]
HEADERS: list[tuple[str, str]] = [
    ("X-Request-Id", "same"),
    ("X-Request-Id", "x" * 5000),
    ("X-Request-Id", "a b\x7f"),
    ("X-Request-Id", "../../etc"),
    ("Authorization", "Bearer " + "k" * 3000),
    ("Authorization", "Basic \xff\xfe"),
    ("Content-Encoding", "gzip"),
    ("Content-Encoding", "br, gzip"),
    ("Accept-Encoding", "*;q=0"),
    ("Accept", "image/png"),
    ("Expect", "100-continue"),
    ("Expect", "tea"),
    ("Upgrade", "websocket"),
    ("Upgrade", "h2c"),
    ("Connection", "close, upgrade"),
    ("Host", "evil.example"),
    ("Cookie", "a=b; " * 500),
    ("Range", "bytes=0-1"),
    ("If-None-Match", "*"),
    ("Forwarded", 'for="[::1]"; proto=https'),
    ("X-Forwarded-For", "1.2.3.4, x"),
    ("traceparent", "00-zz-zz-zz"),
    ("X-Empty", ""),
    *[(f"X-Many-{i}", "v" * 50) for i in range(3)],
]
PATHS = [
    "/",
    "/docs",
    "/openapi.json",
    "/metrics",
    "/health",
    "/ready",
    "/version",
    "/load",
    "/v1/models",
    "/v1/models/..%2f..%2fetc%2fpasswd",
    "/v1/models/%ff%fe",
    "/v1/models/" + "m" * 5000,
    "/v1/requests",
    "/v1/requests/nobody/explain",
    "/v1/requests/%00/explain?format=xml",
    "/v1/requests/%2e%2e/explain?format=text&format=json",
    "/v1/responses/nobody",
    "/v1/responses/%00%ff",
    "/v1/steps?after=-1",
    "/v1/steps?after=99999999999999999999999999",
    "/v1/steps?after=%C2%B2",
    "/v1/steps?after=1&after=2&" + "x=1&" * 500,
    "/v1/trace",
    "/v1/dashboard/setup",
    "/assets/../../etc/passwd",
    "/assets/%2e%2e/%2e%2e/etc/passwd",
    "//v1//completions",
    "/v1/completions/",
    "/v1/completions?model=x",
    "/v1/completions#x",
    "/V1/COMPLETIONS",
    "/v1/nothing",
    "http://127.0.0.1/v1/completions",
    "*",
    "/" + "a/" * 2000,
    "/é",
]
LINES: list[bytes] = [
    b"GET / HTTP/0.9\r\n\r\n",
    b"GET /\r\n\r\n",
    b"POST /v1/completions HTTP/1.0\r\n\r\n{}",
    b"POST /v1/completions HTTP/9.9\r\nHost: x\r\n\r\n",
    b"POST  /v1/completions  HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\nHost: x\nContent-Length: 2\n\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2;ext=1\r\n{}\r\n0\r\nT: r\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n Folded: y\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nBad Name: y\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nX: \x00\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/\x00completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\r\n\r\n\r\n",
    b"\x00" * 100,
]

# ------------------------------------------------------------ deliveries


def _head(method: str, path: str, headers: list[tuple[str, str]]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def _pieces(data: bytes, seed: int) -> list[bytes]:
    """The data cut at a few places."""
    if not data:
        return []
    cuts = sorted({0, len(data), *random.Random(seed).choices(range(len(data)), k=6)})
    return [data[start:stop] for start, stop in pairwise(cuts)]


def _chunked(data: bytes, seed: int) -> list[bytes]:
    return [*(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in _pieces(data, seed)), b"0\r\n\r\n"]


@st.composite
def odd_encodings(draw: st.DrawFn, path: str) -> bytes:
    """The right body of a route, said in an odd way."""
    return ENCODINGS[draw(st.sampled_from(sorted(ENCODINGS)))](dict(BASES[path]))


# Routes that generate come up more often.
ROUTES = [*sorted(STREAMED) * 2, *sorted(BASES)]


@st.composite
def wires(draw: st.DrawFn) -> Odd:
    """A request that is odd in its contents, its encoding, its head, its delivery, or several of these."""
    if draw(one_in(20)):
        return Odd("", (draw(st.sampled_from(LINES) | st.binary(max_size=200)),), cut=True, wild=True)
    path = draw(st.sampled_from(ROUTES))
    data = draw(odd_encodings(path) if draw(one_in(5)) else bodies(path))
    method, headers = "POST", [("Host", "x"), ("Connection", "close"), ("Content-Type", "application/json")]
    wild = draw(one_in(5))
    if wild:
        method = draw(st.sampled_from(["POST"] * 8 + METHODS))
        path = draw(st.sampled_from(PATHS)) if draw(one_in(3)) else path
        headers[2] = ("Content-Type", draw(st.sampled_from(["application/json"] * 4 + TYPES)))
        headers += draw(st.lists(st.sampled_from(HEADERS), max_size=4))
        headers += [(f"X-{i}", "y" * 20) for i in range(draw(st.sampled_from([0, 0, 0, 150])))]
    pieces, cut = draw(deliveries(method, path, headers, data))
    return Odd(path, tuple(pieces), draw(one_in(10)), cut, wild or cut)


@st.composite
def deliveries(
    draw: st.DrawFn, method: str, path: str, headers: list[tuple[str, str]], data: bytes
) -> tuple[list[bytes], bool]:
    """The pieces that go over the wire, and whether they break off."""
    seed = draw(st.integers(0, 99))
    delivery = draw(st.sampled_from(["whole"] * 6 + ["pieces", "chunked", "chunked", "half"]))
    if delivery == "chunked":
        return [_head(method, path, [*headers, ("Transfer-Encoding", "chunked")]), *_chunked(data, seed)], False
    head = _head(method, path, [*headers, ("Content-Length", str(len(data)))])
    if delivery == "whole":
        return [head + data], False
    pieces = [head, *_pieces(data, seed)]
    return (pieces[:-1], True) if delivery == "half" and data else (pieces, False)


@st.composite
def batch_lines(draw: st.DrawFn) -> bytes:
    """A line of a batch file: mostly a request of some route."""
    if draw(one_in(10)):
        return draw(st.binary(max_size=60)).replace(b"\n", b" ")
    path = draw(st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/responses"]))
    body = draw(odd_encodings(path) if draw(one_in(4)) else bodies(path)).replace(b"\n", b" ")
    name = draw(st.sampled_from(['"a"', '"b"', '"' + "c" * 600 + '"', "null", "1", '"\\ud800"', f'"{MODEL}"']))
    line = b'{"custom_id": %s, "method": "POST", "url": "%s", "body": %s}' % (name.encode(), path.encode(), body)
    return line[: draw(st.integers(0, 40))] if draw(one_in(10)) else line
