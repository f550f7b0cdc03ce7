"""Messages of a utility on a bus in the form of DSX Flex, signed by a key of its own."""

import base64
import json
import uuid
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

TOPIC = "grid/v1/isv/utility/loadtarget/set"
SigningKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def make_ec_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def write_public_key(path: Path, *keys: SigningKey) -> Path:
    path.write_bytes(
        b"".join(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo) for key in keys)
    )
    return path


def sign(data: Any, key: SigningKey) -> str:
    algorithm = "ES256" if isinstance(key, ec.EllipticCurvePrivateKey) else "RS256"
    header = {"alg": algorithm, "kid": "1"}
    text = ".".join(_encode(json.dumps(part).encode()) for part in (header, data))
    if isinstance(key, ec.EllipticCurvePrivateKey):
        r, s = decode_dss_signature(key.sign(text.encode(), ec.ECDSA(SHA256())))
        signature = r.to_bytes(32) + s.to_bytes(32)
    else:
        signature = key.sign(text.encode(), padding.PKCS1v15(), SHA256())
    return f"{text}.{_encode(signature)}"


def make_target(kilowatts: float | None, **changes: Any) -> dict[str, Any]:
    limit = None if kilowatts is None else {"value": kilowatts, "unit": "kilowatt"}
    return {"interval": {}, "load_constraint": limit, **changes}


def make_message(*targets: dict[str, Any], key: SigningKey | None = None, **changes: Any) -> bytes:
    data: Any = {"targets": list(targets)}
    event = {
        "specversion": "1.0.2",
        "id": str(uuid.uuid4()),
        "source": "//grid/v1/isv/utility",
        "type": "grid.loadtarget.set.v1",
        "time": "2026-11-28T10:00:00Z",
        "datacontenttype": "application/json",
        "subject": "loadtarget",
        "correlationid": "11111111-1111-4111-8111-111111111111",
        "traceparent": f"00-{'1' * 32}-{'2' * 16}-01",
        "data": data if key is None else sign(data, key),
    }
    return json.dumps({**event, **changes}).encode()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
