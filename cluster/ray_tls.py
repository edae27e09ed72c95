"""TLS of Ray's own channels, which it takes from the environment of each of its processes."""

from __future__ import annotations

import os
from pathlib import Path

from workers.errors import ConfigError
from workers.security_config import SecurityConfig
from workers.tls import CA, CERTIFICATE, KEY

_SWITCH = "RAY_USE_TLS"
_FILES = {"RAY_TLS_SERVER_CERT": CERTIFICATE, "RAY_TLS_SERVER_KEY": KEY, "RAY_TLS_CA_CERT": CA}


def of_private_ray(security: SecurityConfig) -> dict[str, str]:
    """What is set before Ray is imported."""
    if security.tls is None:
        return {}
    return {_SWITCH: "1", **{name: str(Path(security.tls) / file) for name, file in _FILES.items()}}


def require_of_joined_ray(security: SecurityConfig) -> None:
    """Raises ConfigError where `security.tls` is set and this process would join a Ray in plain text."""
    if security.tls is None or security.trusted_network:
        return
    if os.environ.get(_SWITCH, "0").lower() not in ("1", "true"):
        raise ConfigError(
            f"security.tls: a Ray that is joined speaks TLS only if it was started so: start it and `kvferry up` with "
            f"{_SWITCH}=1 and {', '.join(_FILES)}, or set security.trusted_network: true",
            param="security.tls",
        )
    if missing := [name for name in _FILES if not os.environ.get(name)]:
        raise ConfigError(f"{_SWITCH} is set without {' and '.join(missing)}: name the files", param="security.tls")
