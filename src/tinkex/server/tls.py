"""Check a certificate and its key before the server listens, and say what is wrong with them."""

from __future__ import annotations

import ssl

from tinkex.errors import ConfigError


def check_tls(cert: str, key: str) -> None:
    """Make sure that the two files can be read and belong together.

    Raises:
        ConfigError: One is missing or not PEM, the key is encrypted, or it is another one's.
    """
    for name, file in (("tls_cert", cert), ("tls_key", key)):
        try:
            with open(file, "rb"):
                pass
        except OSError as exc:
            raise ConfigError(f"{name}: cannot read {file}: {exc.strerror}.") from exc
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    asked: list[None] = []

    def password() -> str:
        asked.append(None)
        return ""

    try:
        context.load_cert_chain(cert, key, password=password)
    except (ssl.SSLError, ValueError) as exc:
        raise ConfigError(_reason(exc, cert, key, is_encrypted=bool(asked))) from exc


def _reason(exc: Exception, cert: str, key: str, *, is_encrypted: bool) -> str:
    if is_encrypted:
        return (
            f"tls_key: {key} is encrypted. Give an unencrypted key that only the server can read."
        )
    if getattr(exc, "reason", "") == "KEY_VALUES_MISMATCH":
        return f"tls_key: {key} is not the key of the certificate in {cert}."
    return f"tls_cert: {cert} and {key} are not a certificate and its key in PEM format: {exc}."
