"""What is wrong with an authority, a certificate and a key, before anybody is asked to trust them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

T = TypeVar("T")

_DER, _SPKI = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo


def fault_of(ca: bytes, certificate: bytes, key: bytes) -> str:
    """In PEM, as of files ca.crt, tls.crt and tls.key; empty: nothing is."""
    try:
        authorities = _parsed("ca.crt", lambda: x509.load_pem_x509_certificates(ca))
        chain = _parsed("tls.crt", lambda: x509.load_pem_x509_certificates(certificate))
        private = _parsed("tls.key", lambda: serialization.load_pem_private_key(key, None))
    except ValueError as exc:
        return str(exc)
    if private.public_key().public_bytes(_DER, _SPKI) != chain[0].public_key().public_bytes(_DER, _SPKI):
        return "tls.key is not the key of the certificate in tls.crt"
    if not _is_signed(chain, authorities):
        return "tls.crt is not signed by the authority in ca.crt"
    return _out_of_time("tls.crt", chain[0])


def dns_names(certificate: bytes) -> list[str]:
    """Of the first in the file."""
    try:
        extension = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except x509.ExtensionNotFound:
        return []
    return extension.value.get_values_for_type(x509.DNSName)


def _parsed(name: str, parse: Callable[[], T]) -> T:
    try:
        return parse()
    except (ValueError, TypeError):
        # The library's own text may quote what is in the file.
        raise ValueError(f"{name} cannot be read as PEM, or is encrypted") from None


def _is_signed(chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]) -> bool:
    """By an authority itself, or by others in the file whom one signed."""
    signed, rest = chain[0], list(chain[1:])
    while not any(_signed_by(signed, authority) for authority in authorities):
        between = next((one for one in rest if _signed_by(signed, one)), None)
        if between is None:
            return False
        signed = between
        rest.remove(between)
    return True


def _signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _out_of_time(name: str, certificate: x509.Certificate) -> str:
    now = datetime.datetime.now(datetime.UTC)
    if certificate.not_valid_after_utc <= now:
        return f"{name} ran out on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if certificate.not_valid_before_utc > now:
        return f"{name} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    return ""
