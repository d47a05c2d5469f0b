"""``vllm serve`` for tests, on a port of this machine."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


class VllmServer:
    """``vllm serve`` on a port of this machine, in processes that can be killed and started anew.

    It is what the page about self-hosting tells users to run, as the module behind the command:
    the command itself does not start where vLLM was built for CPUs.
    """

    name = "tiny"

    def __init__(self, checkpoint: Path, log: Path) -> None:
        self.log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(checkpoint), "--served-model-name", self.name),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--max-model-len", "512", "--max-num-seqs", "4"),
            *("--dtype", "bfloat16", "--enforce-eager", "--block-size", "32"),
            "--structured-outputs-config",
            '{"backend": "guidance", "disable_any_whitespace": true}',
            "--enable-prompt-tokens-details",
        ]

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Start it, without waiting until it is ready."""
        environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, seconds: float = 180) -> None:
        end = time.monotonic() + seconds
        while not self._is_ready():
            assert self._process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill the server and its engine, which are alone in their process group."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def replies(self) -> list[int]:
        """Return the status of each reply to a chat so far, as its log says."""
        found = re.findall(r'"POST /v1/chat/completions HTTP/1.1" (\d+)', self.log.read_text())
        return [int(status) for status in found]

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()
