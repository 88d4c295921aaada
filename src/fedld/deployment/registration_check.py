"""Does the server know this key? Asked once before a site joins."""

import ssl
from base64 import b64encode
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from fedld.deployment.admission import CHECK
from fedld.errors import FedLDError, printable


def check_registration(server: str, ca: Path, key: Path) -> str | None:
    """Why the server turned this key away; one that cannot be reached has not."""
    try:
        private = load_ssh_private_key(key.read_bytes(), None)
    except (OSError, ValueError, UnsupportedAlgorithm):
        private = None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise FedLDError(f"'{key}' is not a key that `fedld site key` made")
    moment = now().isoformat()
    headers = {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(private.public_key())).decode(),
        TIMESTAMP_HEADER: moment,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(private, moment.encode())).decode(),
    }
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError):
        raise FedLDError(f"'{ca}' is not a certificate (PEM)") from None
    try:
        answer = httpx.post(
            f"https://{server}{CHECK}", headers=headers, content=b"", verify=context, timeout=10
        )
    except httpx.ConnectError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise FedLDError(f"the certificate of '{server}' was not signed by '{ca}': {error}") from None
        return None
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    plain = answer.headers["content-type"] == "text/plain"  # by our admission, not by Flower
    return printable(answer.text) if plain and answer.status_code == httpx.codes.UNAUTHORIZED else None
