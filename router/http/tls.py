"""TLS of the HTTP port: as on all others, only for who has a certificate of the cluster's authority."""

from __future__ import annotations

import logging
import ssl

from workers.tls import CA, CERTIFICATE, KEY, TlsFolder

logger = logging.getLogger(__name__)


def rotating_context(tls: TlsFolder) -> ssl.SSLContext:
    """Each connection is made with the files as they are then."""
    latest, latest_of = _context(tls), tls.pems

    def choose(connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
        nonlocal latest, latest_of
        tls.refresh()
        if latest_of is not tls.pems:
            try:
                latest, latest_of = _context(tls), tls.pems
            except (OSError, ValueError) as error:
                logger.warning("%s: %s; the former files are used on", tls.path, error)
        connection.context = latest

    first = _context(tls)
    first.sni_callback = choose
    return first


def _context(tls: TlsFolder) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tls.path / CA))
    context.load_cert_chain(tls.path / CERTIFICATE, tls.path / KEY)
    context.verify_mode = ssl.CERT_REQUIRED
    # Each connection shows its certificate: none goes on with what one of before a rotation had agreed.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    return context
