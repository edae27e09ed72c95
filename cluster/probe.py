"""`python -m cluster.probe URL`: whether a router says 200, for probes that cannot show a certificate. Of the standard
library alone, since it runs every few seconds.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request
from pathlib import Path

_TIMEOUT_S = 3.0


def main(url: str) -> int:
    """The exit code. The certificate is that of the folder in KVFERRY_TLS."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if folder := os.environ.get("KVFERRY_TLS"):
        context = ssl.create_default_context(cafile=str(Path(folder) / "ca.crt"))
        context.load_cert_chain(Path(folder) / "tls.crt", Path(folder) / "tls.key")
        handlers.append(urllib.request.HTTPSHandler(context=context))
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=_TIMEOUT_S):
            return 0
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
