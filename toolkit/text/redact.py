"""Keep credentials out of recipes, error texts and everything that a run writes.

`looks_secret` decides whether a setting holds a secret. `redact` masks every secret in a text.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, TextIO
from urllib.parse import quote

MASK = "***"
MIN_SECRET_LENGTH = 8
"""Shorter environment values (`1`, `true`, `prod`) are no secrets: they occur in every text."""

_MIN_SECRET_LINE = 16
"""A line of this length in a secret of several lines is a secret, too. Logs are written line by
line, private keys for example."""

_SECRET_VARIABLE = re.compile(
    r"(PASS|PAT|PASSW(OR)?D|PWD|KEY|TOKEN|SECRET|CREDENTIALS?)S?$|"
    # Within a name, unless it is only a part of another word.
    r"(?<!MON)KEY(?!BOARD|MAP|RING|WORD)|TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL"
)
_INNOCENT_VARIABLES = frozenset(
    ["GIT_ASKPASS", "GPG_KEY", "OLDPWD", "PWD", "SSH_ASKPASS", "SUDO_ASKPASS"]
)
"""Exact names: working directories, programs that ask for a password, and the public key that
images of Python name."""

_DIGEST_WORDS = frozenset(
    ["revision", "commit", "sha", "sha1", "sha256", "md5", "hash", "digest", "checksum", "ref"]
)

# Each begins at a word boundary; counts are bounded so that matching stays linear.
_CREDENTIALS = (
    r"hf_[A-Za-z0-9]{16,}",
    r"wandb_v\d_[A-Za-z0-9_]{16,}",
    r"sk-(?=[A-Za-z0-9_-]{0,200}\d)[A-Za-z0-9_-]{16,}",
    r"gh[pousr]_[A-Za-z0-9]{16,}",
    r"github_pat_[A-Za-z0-9_]{16,}",
    r"glpat-[A-Za-z0-9_-]{16,}",
    r"xox[abprs]-[A-Za-z0-9-]{10,}",
    r"AKIA[0-9A-Z]{16}",
    r"AIza[0-9A-Za-z_-]{30,}",
    r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{5,}",
)
_CREDENTIAL = re.compile(rf"(?<![A-Za-z0-9_])(?:{'|'.join(_CREDENTIALS)})")
_URL_LOGIN = re.compile(
    r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]{0,20}://)"
    # `user:pa/ss@` is no URL, but a password all the same; `host:8080/…@` has a port.
    r"(?:[^/\s'\"]{1,256}@|[^/\s@:'\"]{1,128}:(?!\d{1,5}/)[^\s@'\"]{1,256}@)(?=[^\s/])"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]{0,20000}"
    r"(?:-----END [A-Z ]{0,40}PRIVATE KEY-----)?"
)
_SECRET_NAME = (
    r"(?:(?:api|access|private|secret|wandb|ssh|encryption|signing)[_-]?key|"
    r"secrets?|passwords?|passwd|passphrase|credentials?|authorization|bearer|"
    r"(?:hf|auth|access|api|wandb|hub|bearer|session|refresh|github|gitlab|security|secret)"
    r"[_-]?token)"
)
_SECRET_KEY = re.compile(rf"(?<![a-z0-9]){_SECRET_NAME}(?![a-z0-9])")
"""Within one name of a dotted key, in lower case with `_` between its words."""
_REFERENCE = re.compile(
    r"\.pod\.(.*\b(secretRef|secretKeyRef|imagePullSecrets)\b|volumes\b.*\.secret\.)"
)
"""Within the dotted key of what only names a Secret that Kubernetes has."""
_NAME_IN_TEXT = rf"(?:[A-Za-z0-9]{{1,30}}[_-]){{0,6}}{_SECRET_NAME}"
_ASSIGNED = re.compile(
    rf"(?<![A-Za-z0-9])({_NAME_IN_TEXT}[\"']?\s{{0,3}}[=:]\s{{0,3}}[\"']?(?:bearer |basic )?"
    rf"|--{_NAME_IN_TEXT}\s)"
    r"([^\s\"',;&]{6,})",
    re.IGNORECASE,
)
_SIGNED = re.compile(
    r"([?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|sig|key|auth|"
    r"[a-z_-]{0,40}(?:token|secret|password|passwd|signature|api[_-]?key))=)[^&\s'\"]+",
    re.IGNORECASE,
)
"""Marks of a URL that grants access to its target."""
_IN_VALUES = (_CREDENTIAL, _URL_LOGIN, _PRIVATE_KEY, _SIGNED)
_LONG_HEX = re.compile(r"[0-9a-fA-F]{32,128}")
_LONG_BASE64 = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*[0-9])[A-Za-z0-9+]{40,}={0,2}")


@lru_cache(maxsize=4096)
def secret_variable(name: str) -> bool:
    """Does an environment variable's name say that its value is a secret?

    Every name does that ends in PASS, PASSWORD, PWD, PAT, KEY, TOKEN, SECRET or CREDENTIALS,
    but for `_INNOCENT_VARIABLES`.
    """
    name = name.upper()
    return bool(_SECRET_VARIABLE.search(name)) and name not in _INNOCENT_VARIABLES


def looks_secret(key: str, value: object) -> bool:
    """Is `value`, stated under the dotted `key`, a credential that must not be written?

    Judged by the key's name (`api_key`, `hf_token` and `secrets.login`, but not `tokens` and
    `pad_token`), by the value's shape (tokens, logins in URLs, long hex or base64 outside of
    revisions and hashes) and by the secrets of the current environment.
    """
    if value is None or isinstance(value, bool):
        return False
    names = [_words(part) for part in key.split(".")]
    is_secret = any(_SECRET_KEY.search(name) or name == "token" for name in names)
    if is_secret and not _REFERENCE.search(key):
        return True
    if not isinstance(value, str):
        return False
    if value in _environment_secrets() or any(one.search(value) for one in _IN_VALUES):
        return True
    if _DIGEST_WORDS.intersection(names[-1].split("_")):
        return False
    return bool(_LONG_HEX.fullmatch(value) or _LONG_BASE64.fullmatch(value))


def redact(text: str) -> str:
    """`text` with every credential-shaped part, and every secret of the current environment,
    replaced by `***`."""
    if secrets := _environment_secrets():
        text = _spelt(secrets).sub(MASK, text)
    text = _PRIVATE_KEY.sub(MASK, text)
    text = _URL_LOGIN.sub(rf"\1{MASK}@", text)
    text = _SIGNED.sub(rf"\1{MASK}", text)
    text = _ASSIGNED.sub(rf"\1{MASK}", text)
    return _CREDENTIAL.sub(MASK, text)


def copy_to_log(lines: TextIO, log: Path) -> None:
    """Append a process's output to its log, secrets masked.

    On a full disk lines are lost, but still read: the process must not wait for this one.
    """
    with ExitStack() as opened:
        file: IO[bytes] | None = None
        for line in lines:
            with suppress(OSError):
                file = file or opened.enter_context(log.open("ab", buffering=0))
                file.write(redact(line).encode())


def _environment_secrets() -> frozenset[str]:
    """The values of variables that are secrets by their names."""
    values = (os.environ[name].strip() for name in os.environ if secret_variable(name))
    return frozenset(value for value in values if len(value) >= MIN_SECRET_LENGTH)


@lru_cache(maxsize=8)
def _spelt(secrets: frozenset[str]) -> re.Pattern[str]:
    """Finds any of the secrets, however it is spelt. The longest is found first."""
    spelt = {text for secret in secrets for text in _spellings(secret)}
    return re.compile("|".join(map(re.escape, sorted(spelt, key=len, reverse=True))))


def _spellings(secret: str) -> Iterator[str]:
    """The forms of a secret in a text: as it is, by line, in JSON, Python, a shell, a URL."""
    yield secret
    for line in secret.splitlines():
        if len(line.strip()) >= _MIN_SECRET_LINE:
            yield line.strip()
    yield from (json.dumps(secret, ensure_ascii=ascii_)[1:-1] for ascii_ in (True, False))
    yield repr(secret)[1:-1]
    yield shlex.quote(secret).removeprefix("'").removesuffix("'")
    yield quote(secret, safe="")
    yield quote(secret)


def _words(key: str) -> str:
    """`HFToken`, `hf-token` and `hf_token` → `hf_token`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", key)
    return re.sub(r"[^a-z0-9]+", "_", spaced.lower()).strip("_")
