"""Verify signed data: JWS in its compact form (RFC 7515), by ES256 or RS256, which is what DSX Flex has."""

import base64
import binascii
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.errors import UsageError
from phalanx.safe_files import read_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

COORDINATE_BYTES = 32
"""Bytes of r and of s in an ES256 signature."""
PEM_END = b"-----END PUBLIC KEY-----"


class SignatureError(Exception):
    """The data are not signed by a key that is known."""


def load_public_keys(path: Path) -> "list[PublicKeyTypes]":
    """Load the public keys of a PEM file. Raises UsageError for what is no such file."""
    try:
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError:
        raise UsageError("flex: key_file: cryptography is not installed: pip install 'phalanx[fleet]'") from None
    try:
        blocks = [block + PEM_END for block in read_bytes(path).split(PEM_END)[:-1]]
        keys = [load_pem_public_key(block) for block in blocks]
    except OSError as error:
        raise UsageError(f"power.flex.key_file: {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"power.flex.key_file: {path}: no public key in PEM: {error}") from None
    if not keys:
        raise UsageError(f"{path}: expected public keys in PEM, such as `openssl pkey -pubout` writes; found none")
    return keys


def verify_jws(text: str, keys: "Sequence[PublicKeyTypes]") -> bytes:
    """Return the payload of a JWS. Raises SignatureError where no key has signed it.

    The algorithm is taken from the key; the header has only to agree with it.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
    from cryptography.hazmat.primitives.hashes import SHA256

    parts = text.split(".")
    if len(parts) != 3:
        raise SignatureError("it is no JWS in compact form")
    try:
        header, payload, signature = (_decode_base64url(part) for part in parts)
        algorithm = json.loads(header)["alg"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SignatureError("it is no JWS in compact form") from None
    signed = text.rpartition(".")[0].encode()
    for key in keys:
        try:
            if isinstance(key, EllipticCurvePublicKey) and algorithm == "ES256":
                if len(signature) != 2 * COORDINATE_BYTES or key.curve.name != "secp256r1":
                    continue
                r, s = (int.from_bytes(part) for part in (signature[:COORDINATE_BYTES], signature[COORDINATE_BYTES:]))
                key.verify(encode_dss_signature(r, s), signed, ECDSA(SHA256()))
            elif isinstance(key, RSAPublicKey) and algorithm == "RS256":
                key.verify(signature, signed, PKCS1v15(), SHA256())
            else:
                continue
        except InvalidSignature:
            continue
        return payload
    raise SignatureError(f"no key of key_file has signed it (alg {algorithm!r:.20})")


def _decode_base64url(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        raise ValueError("no base64url") from None
