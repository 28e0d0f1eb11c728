"""Proofs of a shared secret: each end of a connection answers the other's nonce with a digest, not with the secret."""

import hashlib
import hmac

NONCE = PROOF = 32
"""Bytes of a nonce and of a proof."""


def proof(secret: str, end: bytes, theirs: bytes, mine: bytes) -> bytes:
    """Return the proof that one end has the secret: a digest over the nonces of both ends.

    `end` names the end that proves itself, so that the other end cannot send the proof back as its own.
    """
    return hmac.digest(secret.encode(), end + theirs + mine, hashlib.sha256)


def proves(received: bytes, secret: str, end: bytes, theirs: bytes, mine: bytes) -> bool:
    """Return whether the other end's proof is right, in a time that doesn't depend on it.

    The nonces are those of the end that has proved itself: `theirs` is the nonce of this end.
    """
    return hmac.compare_digest(received, proof(secret, end, theirs, mine))
