"""`batchsql emulate` as a user runs it, and its page."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from batchsql import cli
from batchsql.emulate import (
    AnthropicLimits,
    BedrockLimits,
    Behaviour,
    Emulator,
    GoogleLimits,
    OpenAILimits,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rehearsal.md").read_text(encoding="utf-8")


def post(url: str, content: object) -> dict[str, object]:
    request = urllib.request.Request(
        url, json.dumps(content).encode(),
        {"content-type": "application/json", "authorization": "Bearer rehearsal"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=30) as reply:
        result: dict[str, object] = json.load(reply)
        return result


@pytest.mark.parametrize(
    ("number", "args"), [(signal.SIGINT, []), (signal.SIGTERM, ["--s3", "moto"])]
)
def test_command_serves_until_it_is_stopped_and_tells_the_bill(
    number: signal.Signals, args: list[str]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from batchsql.cli import main; main()", "emulate", "--log",
         "--misbehave", "empty skip=1", *args],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        told = ""
        for line in process.stdout:
            told += line
            if line.startswith("Ctrl-C"):
                break
        variables = dict(re.findall(r"export (\w+)=(\S+)", told))
        s3_url = variables.get("AWS_ENDPOINT_URL_S3")
        assert (s3_url is not None) == bool(args)
        assert set(variables) == set(Emulator(s3_endpoint_url=s3_url).environment)
        if s3_url is not None:
            with urllib.request.urlopen(s3_url, timeout=30) as reply:
                assert b"<Name>rehearsal</Name>" in reply.read()
            assert "one bucket, which is empty: s3://rehearsal" in told
        question = {"model": "gpt-5-mini", "messages": [{"role": "user", "content": "hi"}]}
        url = f"{variables['OPENAI_BASE_URL']}/chat/completions"
        contents = [post(url, question)["choices"][0]["message"]["content"] for _ in range(2)]  # type: ignore[index]
        assert contents[0]
        assert contents[1] == ""
        process.send_signal(number)
        rest, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
    assert rest.count("openai.chat  POST /openai/v1/chat/completions  200") == 2
    assert "Would have been billed: 2 answers, of which 1 to a question" in rest


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--misbehave", "explode"], "got 'explode'; the behaviours are: rate_limit, server_error"),
        (["--misbehave", "drop when=now"], "it takes: behaviour, endpoint, text"),
        (["--misbehave", "drop endpoint=openai.chatt"], "'openai.chatt'; the operations are: "),
        (["--s3", "foo"], "got 'foo'; give moto, or a URL"),
        (["--s3", "http://[x"], "got 'http://[x'; give moto, or a URL"),
        (["--limit", "openai.nope=1"], "batch_requests"),
        (["--speed", "0"], "above zero"),
    ],
)
def test_wrong_option_is_refused(args: list[str], told: str) -> None:
    result = CliRunner().invoke(cli.main, ["emulate", *args])
    assert result.exit_code != 0
    assert told in " ".join(result.output.replace("│", "").split())
    assert "in the declaration" not in result.output


def test_port_that_is_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(cli.main, ["emulate", "--port", str(port)])
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: port {port} is in use; give another --port, or leave it out for a free one\n"
    )


@pytest.mark.parametrize("behaviour", [each.value for each in Behaviour])
def test_page_describes_every_misbehaviour(behaviour: str) -> None:
    assert f"| `{behaviour}` |" in PAGE


@pytest.mark.parametrize("limits", [OpenAILimits, AnthropicLimits, BedrockLimits, GoogleLimits])
def test_page_names_every_limit(limits: type) -> None:
    provider = limits.__name__.removesuffix("Limits").lower()
    for name in limits.__dataclass_fields__:  # type: ignore[attr-defined]
        assert f"`{provider}.{name}`" in PAGE
