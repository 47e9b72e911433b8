"""Secrets are found and masked; ordinary settings are left alone."""

import json
import shlex
import time
from urllib.parse import quote

import pytest

from toolkit.text.redact import (
    MASK,
    looks_secret,
    redact,
    secret_variable,
)

HEX = "0123456789abcdef0123456789abcdef01234567"
SHAPES = [
    "hf_" + "aB3" * 12,
    "sk-proj-" + "aB3" * 12,
    "ghp_" + "aB3" * 12,
    "github_pat_" + "aB3_" * 12,
    "glpat-" + "aB3" * 7,
    "wandb_v1_" + "aB3" * 12,
    "AKIA" + "ABCD1234" * 2,
    "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM",
]


@pytest.mark.parametrize("value", SHAPES)
def test_shapes(value: str) -> None:
    assert looks_secret("data.tokenizer", value)
    assert redact(f"before {value} after") == f"before {MASK} after"


@pytest.mark.parametrize(
    "key",
    ["api_key", "wandb.apiKey", "token", "hf_token", "HFToken", "password", "a.secrets.b",
     "access-key", "db_passwd", "credentials", "model.config.auth_token",
     "launch.kubernetes.pod.containers[0].env[0].secret"],
)  # fmt: skip
def test_secret_keys(key: str) -> None:
    assert looks_secret(key, "x")
    assert looks_secret(key, 12345678)
    assert not looks_secret(key, None)
    assert not looks_secret(key, True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.tokens", 2e12),
        ("data.tokenizer", "meta-llama/Llama-3.1-8B"),
        ("data.tokenizer", "risk-based-classifier-2-large"),
        ("data.train.text_field", "text"),
        ("model.config.pad_token", "<pad>"),
        ("model.config.bos_token_id", 1),
        ("model.revision", HEX),
        ("data.tokenizer_revision", HEX),
        ("model.hub", "https://huggingface.co/a/b@main"),
        ("data.train.files", "/cache/" + HEX + "/train.txt"),
        ("name", "llama-3.1-8b-pretrain-with-a-very-long-name-2"),
        ("key", "value"),
        ("launch.kubernetes.pod.containers[0].envFrom[0].secretRef.name", "keys"),
        ("launch.kubernetes.pod.containers[0].env[0].valueFrom.secretKeyRef.key", "WANDB"),
        ("launch.kubernetes.pod.imagePullSecrets[0].name", "registry"),
        ("launch.kubernetes.pod.volumes[0].secret.secretName", "keys"),
    ],
)
def test_ordinary_settings(key: str, value: object) -> None:
    assert not looks_secret(key, value)


def test_long_hex_where_no_revision_is_expected() -> None:
    assert looks_secret("logging.project", HEX)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("https://b.host/a?X-Amz-Expires=6&X-Amz-Credential=canary&X-Amz-Signature=0a1b",
         "https://b.host/a?X-Amz-Expires=6&X-Amz-Credential=***&X-Amz-Signature=***"),
        ("https://host/a.bin?sv=2024&sig=canary%3D", "https://host/a.bin?sv=2024&sig=***"),
        *((f"https://host/a?part=1&{name}=canary&max_tokens=5",
           f"https://host/a?part=1&{name}=***&max_tokens=5")
          for name in ("token", "access_token", "api_key", "key", "password")),
        *((f"https://{login}@host/x", "https://***@host/x")
          for login in ("me:pw", "me:p/w", "me:p@w", "me:p:w/1")),
    ],
)  # fmt: skip
def test_urls_that_give_access(url: str, masked: str) -> None:
    assert looks_secret("data.train.path", url)
    assert redact(f"GET {url}") == f"GET {masked}"


@pytest.mark.parametrize(
    "url",
    ["https://host/a.bin?signal=yes", "https://host/a.bin?max_tokens=5&keys=a",
     "https://host:8080/model@main"],
)  # fmt: skip
def test_ordinary_urls(url: str) -> None:
    assert not looks_secret("data.train.path", url)
    assert redact(url) == url


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", 'quo"te\\canary')
    monkeypatch.setenv("SHORT_TOKEN", "dev")
    assert looks_secret("name", 'quo"te\\canary')
    assert not looks_secret("name", "dev")
    assert redact('a quo"te\\canary b, dev') == f"a {MASK} b, dev"
    assert redact('{"k": "quo\\"te\\\\canary"}') == f'{{"k": "{MASK}"}}'
    monkeypatch.setenv("SOME_API_KEY", "changed-canary")
    assert redact("changed-canary") == MASK


def test_variable_names() -> None:
    secret = (
        "HF_TOKEN WANDB_API_KEY db_password MYSECRET DB_PASS MY_PAT KEYRING_PASSWORD "
        "SURVEYMONKEY_API_KEY SSHPASS MYSQL_PWD GOOGLE_CREDENTIALS AWS_ACCESS_KEY_ID MONKEY"
    )
    assert [name for name in secret.split() if not secret_variable(name)] == []
    other = (
        "TOKENIZERS_PARALLELISM HOME XKB_KEYMAP PWD OLDPWD SSH_AUTH_SOCK SSH_ASKPASS "
        "TERM_SESSION_ID PATH GNOME_KEYRING_CONTROL"
    )
    assert [name for name in other.split() if secret_variable(name)] == []


@pytest.mark.parametrize(
    "name", ["DB_PASS", "MY_PAT", "KEYRING_PASSWORD", "SURVEYMONKEY_API_KEY"]
)
def test_a_value_however_it_is_spelt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = "it's a pässword/\n-----BEGIN PRIVATE LINES-----"
    monkeypatch.setenv(name, value)
    assert looks_secret("launch.slurm.options[0]", value)
    for spelt in (
        value,
        repr(value),
        json.dumps(value),
        shlex.join(["x", value]),
        quote(value),
    ):
        masked = redact(f"before {spelt} after")
        assert "ssword" not in masked, spelt
        assert "PRIVATE" not in masked, spelt
        assert masked.startswith("before ")
        assert masked.endswith(" after")
    for line in value.splitlines():
        assert redact(line) == MASK


@pytest.mark.parametrize(
    "text",
    ["WANDB_API_KEY=abcdef123", "--api-key abcdef123", '"password": "abcdef123"',
     "hf_token: abcdef123"],
)  # fmt: skip
def test_assignments(text: str) -> None:
    masked = redact(text)
    assert "abcdef123" not in masked
    assert MASK in masked


@pytest.mark.parametrize(
    "text", ["tokens: 123456789", "the secret is out", "tokenizer: abcdefghijk", f"rev {HEX}"]
)
def test_ordinary_texts(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "text", ["a_" * 100_000, "sk-" * 60_000, "eyJ" * 60_000, "x://" * 50_000]
)
def test_no_slow_text(text: str) -> None:
    begin = time.thread_time()
    redact(text)
    # Linear patterns take half a second, quadratic ones minutes.
    assert time.thread_time() - begin < 20
