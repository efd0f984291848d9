"""The pages' files, as they lie in the package: open to everybody, for they hold no data."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

_FOLDER = Path(__file__).parent / "static"
_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_PAGES = {"/": "chat.html", "/dashboard": "dashboard.html"}

FILES: dict[str, str] = _PAGES | {
    f"/assets/{path.name}": path.name
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _TYPES and path.suffix != ".html"
}
"""Path of the URL to name of the file."""

STATIC_PATHS = frozenset(FILES)

_HEADERS = {
    # Nothing is loaded from elsewhere, and nothing of another page may frame this one.
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def serve_file(path: str) -> Response:
    """The file at a path of `FILES`."""
    file = _FOLDER / FILES[path]
    return Response(file.read_bytes(), headers=_HEADERS, media_type=_TYPES[file.suffix])
