"""The secret that the processes of one job share, and signatures made with it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NoReturn

_NBYTES = 32  # of a secret, of a signature and of a nonce


class Secret:
    """A key for signatures by HMAC-SHA256.

    Keys are derived for one purpose each, so that a signature made for one is worth nothing for another.

    Args:
        key: 32 bytes that nobody outside the job knows.
    """

    NBYTES = _NBYTES

    def __init__(self, key: bytes) -> None:
        if len(key) != _NBYTES:
            raise ValueError(f"expected a key of {_NBYTES} bytes, got {len(key)}")
        self._key = key

    @classmethod
    def random(cls) -> Secret:
        """Returns a new secret."""
        return cls(secrets.token_bytes(_NBYTES))

    @classmethod
    def from_text(cls, text: str) -> Secret:
        """Returns the secret that a text stands for."""
        return cls(hashlib.sha256(b"bagua_kernels secret\0" + text.encode()).digest())

    def derive(self, *labels: str | bytes) -> Secret:
        """Returns the key for one purpose; other labels give another key."""
        return Secret(self.sign(b"derive", *(label.encode() if isinstance(label, str) else label for label in labels)))

    def sign(self, *parts: bytes) -> bytes:
        """Returns the signature of a list of byte strings: 32 bytes."""
        # Lengths go in, so that no two lists of parts are the same message.
        message = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.digest(self._key, message, "sha256")

    def verify(self, signature: bytes, *parts: bytes) -> bool:
        """Returns True if a signature is that of these parts, in a time that does not depend on it."""
        return hmac.compare_digest(signature, self.sign(*parts))

    def export(self) -> str:
        """Returns the key as text, for a place that only processes of the job can read."""
        return self._key.hex()

    def __repr__(self) -> str:
        """Returns a text without the key, for logs."""
        return "Secret(...)"

    def __reduce__(self) -> NoReturn:
        """Refuses to be pickled: a secret must not travel by accident."""
        raise TypeError("a Secret is not pickled: give every rank the same BAGUA_KERNELS_SECRET instead")
