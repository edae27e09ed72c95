"""A development authority: certificates for the members of one cluster, and for its clients."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from workers.errors import ConfigError
from workers.tls import CA, CERTIFICATE, KEY, MEMBER_SUFFIX

# The authority's own key, beside its certificate.
CA_KEY = "ca.key"
_AUTHORITY_DAYS = 3650
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
_SIGNS = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)
# Clocks of machines differ.
_EARLIER = datetime.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class _Terms:
    """Of one certificate."""

    subject: x509.Name
    names: Sequence[x509.GeneralName]
    usages: Sequence[x509.ObjectIdentifier]
    days: int


def open_authority(folder: Path) -> Authority:
    """The one in `folder`, made there if there is none. Raises ConfigError."""
    if not (folder / CA_KEY).exists():
        if (folder / CA).exists():
            raise ConfigError(f"{folder / CA} is there without {CA_KEY}: it is another's; give a new folder")
        return _new_authority(folder)
    try:
        certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{folder}: the authority there cannot be read ({exc}); give a new folder") from None
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return Authority(certificate, key)


def renew(authority: Authority, folder: Path, days: int) -> None:
    """A new certificate and key for whoever the ones in `folder` are of. Raises ConfigError."""
    try:
        former = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
        names = former.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        usages = former.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (OSError, ValueError, x509.ExtensionNotFound) as exc:
        raise ConfigError(
            f"{folder / CERTIFICATE} cannot be read ({exc}); delete the folder, and make it anew"
        ) from None
    _issue(authority, folder, _Terms(former.subject, list(names), list(usages), days))


def issue_member(authority: Authority, folder: Path, cluster: str, hosts: Sequence[str], days: int) -> None:
    """Files for every process of a cluster: `hosts` are the names and addresses by which clients know its routers."""
    names = [cluster + MEMBER_SUFFIX, "localhost", "127.0.0.1", "::1", *hosts]
    general = [_general_name(name) for name in dict.fromkeys(names)]
    # Members call each other.
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    _issue(authority, folder, _Terms(_name(cluster), general, usages, days))


def issue_client(authority: Authority, folder: Path, name: str, days: int) -> None:
    """Files for one who may ask the routers, and is no member."""
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    _issue(authority, folder, _Terms(_name(name), [x509.DNSName(f"{name}.client")], usages, days))


def _new_authority(folder: Path) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("kvferry development authority")
    certificate = (
        _draft(name, name, key, _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_SIGNS, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(folder / CA, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    _write(folder / CA_KEY, _pem_of(key), 0o600)
    return Authority(certificate, key)


def _issue(authority: Authority, folder: Path, terms: _Terms) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    certificate = (
        _draft(terms.subject, authority.certificate.subject, key, terms.days)
        .add_extension(x509.SubjectAlternativeName(terms.names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(terms.usages), critical=False)
        .add_extension(by, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(authority.key, hashes.SHA256())
    )
    # What does not fit together yet is not taken by who reads them meanwhile.
    _write(folder / KEY, _pem_of(key), 0o600)
    _write(folder / CA, authority.certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    _write(folder / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _draft(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - _EARLIER,
        not_valid_after=now + datetime.timedelta(days=days),
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not _HOST.fullmatch(name):
            raise ConfigError(f"{name!r} is neither an address nor the name of a host") from None
        return x509.DNSName(name)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(*kinds, serialization.NoEncryption())


def _write(path: Path, data: bytes, mode: int) -> None:
    """Whole or not at all. Raises ConfigError."""
    draft = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
        draft.replace(path)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}; give a folder that can be written") from None
