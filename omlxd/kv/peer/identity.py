"""Who this omlxd is to others of its owner, and which it trusts: files below `peer/` of the base path.

| file          | what                                                                              |
|---------------|-----------------------------------------------------------------------------------|
| `own.pem`     | a key of 256 bits (P-256) and its certificate, made at first use                  |
| `paired.json` | certificates of the others                                                        |
| `code.json`   | a pairing code that was shown: for one pairing, 5 minutes and 3 tries             |
| `listening`   | locked by those who listen, so that a code is shown only where one counts         |

The channel is Python's TLS 1.3. Each side shows its certificate, and trusts those of `paired.json` alone: no
authority signs any. At a pairing no certificate is known yet. Then both prove that they know the code, by an
HMAC over the certificates that each of them sees: somebody in between has another certificate and no code,
which has 80 bits, so nothing that a listener hears tells it in time.

Python's ssl makes no certificates. `cryptography` does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import ssl
import time
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ...common.files import read_small, write_atomic

FOLDER, LISTENING = "peer", "listening"
CODE_S, TRIES = 300.0, 3
CODE_CHARS, _ALPHABET = 16, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
"""80 bits."""
MOST_CERTIFICATE = 4096
"""Bytes of one, in DER."""
MOST_NAME = 64
_ALWAYS = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
"""Clocks of two machines may differ, and a key is forgotten by its owner alone."""


class PeerError(Exception):
    """The other side can't be asked, or says what it must not. The text is a sentence without full stop.

    passing  it is away or busy: another try may go well
    """

    def __init__(self, why: str, *, passing: bool = False):
        super().__init__(why)
        self.passing = passing


class Paired(msgspec.Struct, frozen=True):
    """Another omlxd. name: its host's, as it says; certificate: in PEM; since: ISO 8601, UTC.

    address  where it was then: this machine's `omlxd peer pair ADDRESS`, or whence it asked; "": not known
    """

    name: str
    certificate: str
    since: str
    address: str = ""

    @property
    def fingerprint(self) -> str:
        return fingerprint(ssl.PEM_cert_to_DER_cert(self.certificate))


class _Code(msgspec.Struct):
    """`expires` in seconds since 1970."""

    code: str
    expires: float
    tries: int


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate in DER, in hex."""
    return hashlib.sha256(certificate).hexdigest()


def proof(code: str, role: str, server: bytes, client: bytes) -> bytes:
    """Return what shows that the server or the client, `role`, knows the code and sees these certificates."""
    said = f"omlxd pair 1 {role} {fingerprint(server)} {fingerprint(client)}"
    return hmac.digest(code.encode(), said.encode(), "sha256")


def plain_code(typed: str) -> str:
    """Return a code as it is compared: people type it in small letters, with or without the dashes."""
    return "".join(sign for sign in typed.upper() if sign not in "- ")


class Identity:
    """The files of one base path. Methods raise OSError, and PeerError for a file that makes no sense."""

    def __init__(self, base_path: Path):
        self.folder = base_path / FOLDER

    # ----------------------------------------------------------------- own

    def own(self) -> Path:
        """Return the file of the own key and certificate, which is made if it is missing."""
        path = self.folder / "own.pem"
        with self._locked():
            if not path.exists():
                write_atomic(path, _new_pem(), sync=True)
        return path

    def own_certificate(self) -> bytes:
        """Return the own certificate, in DER."""
        _, begin, rest = self.own().read_text().partition("-----BEGIN CERTIFICATE-----")
        return ssl.PEM_cert_to_DER_cert(begin + rest)

    def for_server(self) -> ssl.SSLContext:
        """Make a context for clients without a certificate and those that are paired."""
        return self._context(ssl.PROTOCOL_TLS_SERVER, ssl.CERT_OPTIONAL)

    def for_client(self, *, pairing: bool = False) -> ssl.SSLContext:
        """Make a context that takes servers that are paired. pairing: any, to which nothing is shown."""
        if pairing:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return context
        return self._context(ssl.PROTOCOL_TLS_CLIENT, ssl.CERT_REQUIRED)

    def _context(self, protocol: int, verify: ssl.VerifyMode) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # Its certificate says who it is, wherever it is.
        context.load_cert_chain(self.own())
        for each in self.paired():
            context.load_verify_locations(cadata=each.certificate)
        context.verify_mode = verify
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        return context

    # ----------------------------------------------------------------- others

    def paired(self) -> tuple[Paired, ...]:
        try:
            return msgspec.json.decode(read_small(self.folder / "paired.json"), type=tuple[Paired, ...])
        except FileNotFoundError:
            return ()
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise PeerError(
                f"{self.folder / 'paired.json'} makes no sense: remove it and pair again"
            ) from error

    def why_unpaired(self, peer: str) -> str:
        """Say that nothing is paired, without which `peer` can't be asked; "": asking it may go well."""
        with contextlib.suppress(OSError, PeerError):
            return "" if self.paired() else f"not paired: `omlxd peer pair {peer}`"
        return ""

    def is_paired(self, certificate: bytes) -> bool:
        return fingerprint(certificate) in {each.fingerprint for each in self.paired()}

    def add(self, name: str, certificate: bytes, address: str = "") -> None:
        """Trust a certificate, in DER. Raises PeerError if it is none."""
        pem = ssl.DER_cert_to_PEM_cert(certificate)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem)
        except (ssl.SSLError, ValueError) as error:
            raise PeerError("what it shows is no certificate") from error
        name = "".join(sign for sign in name[:MOST_NAME] if sign.isprintable()) or "?"
        new = Paired(name, pem, datetime.now(UTC).isoformat(timespec="seconds"), address)
        with self._locked():
            self._write([each for each in self.paired() if each.certificate != pem] + [new])

    def remove(self, name: str) -> int:
        """Trust no one of that name, or fingerprint's beginning, any more; returns how many that were."""
        with self._locked():
            paired = self.paired()
            left = [
                each
                for each in paired
                if each.name != name and not (len(name) >= 8 and each.fingerprint.startswith(name.lower()))
            ]
            self._write(left)
        return len(paired) - len(left)

    def _write(self, paired: list[Paired]) -> None:
        write_atomic(self.folder / "paired.json", msgspec.json.format(msgspec.json.encode(paired)), sync=True)

    # ----------------------------------------------------------------- the code

    def new_code(self, now: float | None = None) -> str:
        """Make the code of the next pairing, which replaces an older one; returns it for people."""
        code = "".join(secrets.choice(_ALPHABET) for _ in range(CODE_CHARS))
        expires = (time.time() if now is None else now) + CODE_S
        with self._locked():
            write_atomic(self.folder / "code.json", msgspec.json.encode(_Code(code, expires, TRIES)))
        return "-".join(code[at : at + 4] for at in range(0, CODE_CHARS, 4))

    def take_code(self, now: float | None = None) -> str:
        """Return the code that counts, and take one of its tries; "": there is none."""
        path = self.folder / "code.json"
        with self._locked():
            try:
                held = msgspec.json.decode(read_small(path), type=_Code)
            except (OSError, msgspec.MsgspecError, ValueError):
                return ""
            if held.tries < 1 or (time.time() if now is None else now) >= held.expires:
                path.unlink(missing_ok=True)
                return ""
            held.tries -= 1
            write_atomic(path, msgspec.json.encode(held))
        return held.code

    def end_code(self) -> None:
        """A pairing has taken place: the code is for no other."""
        (self.folder / "code.json").unlink(missing_ok=True)

    # ----------------------------------------------------------------- who listens

    def hold_listening(self) -> int:
        """Note that this process pairs, until it ends or closes the descriptor returned."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.folder / LISTENING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def somebody_listens(self) -> bool:
        """Return whether a process of this base path pairs."""
        try:
            fd = os.open(self.folder / LISTENING, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    @contextlib.contextmanager
    def _locked(self) -> Generator[None, None, None]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _new_pem() -> bytes:
    # Imported at the first pairing of a machine, and never again.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    # A name of its own: those who check find an issuer by its name.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"omlxd {secrets.token_hex(16)}")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), *_ALWAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)
