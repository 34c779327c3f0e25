"""Secrets are redacted, and nothing else is."""

from pathlib import Path

import pytest

from maxhydra.record import redact_argv, redact_text

HEX = "0123456789abcdef0123456789abcdef01234567"
SECRETS = [
    'WANDB_API_KEY = "{}"',
    "export AWS_SECRET_ACCESS_KEY={}",
    "tracker:\n  api_key: {}\n",
    '{{"password": "{}", "user": "me"}}',
    'os.environ["HF_TOKEN"] = "{}"',
    'os.getenv("HF_TOKEN", "{}")',
    'api_key: str = "{}"',
    "-client_secret: '{}'",
    "https://me:{}@example.com/repo.git",
    "https://{}@example.com/repo.git",
    "Authorization: Bearer {}",
    "accessToken: {}",
    "--my-api-key={}",
    'note = "use password={} for now"',
]
KNOWN_TOKENS = ["hf_" + "aB3" * 11, "sk-proj-" + "x1" * 12, "ghp_" + "a1" * 18, "AKIA" + "Q7" * 8, "xoxb-123456-abcdef"]
HARMLESS = [
    "train.sample.tokens=100",
    "data.tokenizer.kind=byte",
    "pad_token_id: 3",
    'eos_token = "</s>"',
    "tokens_per_second=12.5",
    "token = tokens[i]",
    "token = next_token(state)",
    "def send(token: str, password: str | None = None) -> None:",
    "for token in tokens: pass",
    f"git sha {HEX}",
    "optimizer.learning_rate=3e-4",
    "https://example.com/a?b=c",
    "git@github.com:me/repo.git",
    "a = \"it's\"; b = '\"'",
]


@pytest.mark.parametrize("line", SECRETS)
def test_named_secrets_are_redacted(line):
    hidden = redact_text(line.format(HEX))
    assert HEX not in hidden and "***" in hidden
    assert hidden == line.format("***").replace("me:***@", "***@")


@pytest.mark.parametrize("token", KNOWN_TOKENS)
def test_known_tokens_are_redacted_anywhere(token):
    assert redact_text(f"run --x {token} # {token}.") == "run --x *** # ***."
    assert token not in " ".join(redact_argv(["maxhydra", f"run.notes={token}", token]))


@pytest.mark.parametrize("line", HARMLESS)
def test_harmless_text_is_unchanged(line):
    assert redact_text(line) == line


def test_private_key():
    text = f"a\n-----BEGIN RSA PRIVATE KEY-----\n{HEX}\n-----END RSA PRIVATE KEY-----\nb"
    assert redact_text(text) == "a\n-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----\nb"


def test_command_line():
    argv = ["--token", "abc", "+x.password=hunter2", "--key=v", "train.steps=3", "tracker.api_key=null", "token=a b=c"]
    assert redact_argv(argv) == [
        "--token",
        "***",
        "+x.password=***",
        "--key=v",
        "train.steps=3",
        "tracker.api_key=null",
        "token=***",
    ]


def test_source_code_is_unchanged():
    """The package's source contains no secrets, so redaction must not change it."""
    for path in sorted((Path(__file__).parents[2] / "maxhydra" / "optim").glob("*.py")):
        assert redact_text(path.read_text()) == path.read_text()


@pytest.mark.parametrize("piece", ["a", 'a="', "a.b/", 'token="', "x://", "bearer ", "a-"])
def test_long_lines_are_searched_in_linear_time(piece):
    """A quadratic search would take minutes on these."""
    text = piece * (200_000 // len(piece))
    assert redact_text(text).startswith(piece[:1])


@pytest.mark.parametrize("text", ["wandb login {}", "the key is {}", "W&B token: {}"])
def test_hexadecimal_keys_are_redacted_in_context(text):
    assert redact_text(text.format(HEX)) == text.format("***")


@pytest.mark.parametrize(
    "text", ["export HF_TOKEN=$(cat ~/.hf)", 'export HF_TOKEN="$HF_TOKEN"', "tracker.api_key=${oc.env:KEY}"]
)
def test_references_are_not_secrets(text):
    assert redact_text(text) == text and redact_argv([text]) == [text]
