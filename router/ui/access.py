"""How a browser gives its API key: it cannot put a header on a page it goes to, but asks its user where HTTP Basic is.

Only below /ui, where all that can be done is to look: a browser sends what it was told by itself, on another site's
behalf too.
"""

from __future__ import annotations

import base64
import binascii

from starlette.responses import Response

from router.http.answers import error_response
from workers.errors import KVFerryError


def key_header(path: str, authorization: str) -> str:
    """The Authorization header as the keys know it: below /ui Basic's password is the key, whatever the name."""
    scheme, _, credentials = authorization.partition(" ")
    if not _is_page(path) or scheme.lower() != "basic":
        return authorization
    try:
        decoded = base64.b64decode(credentials.strip(), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return f"Bearer {decoded.partition(':')[2]}"


def refusal(path: str, error: KVFerryError) -> Response:
    """Lets a browser ask its user for the key of the page."""
    response = error_response(error)
    if _is_page(path):
        response.headers["www-authenticate"] = 'Basic realm="kvferry: the password is an API key", charset="UTF-8"'
    return response


def _is_page(path: str) -> bool:
    return path == "/ui" or path.startswith("/ui/")
