"""Requests a second of ``LocalBackend.complete`` against a bare loop over the same engine.

Both send the same number of prompts of the same form with the same grammar, in turns, so that a
busy machine slows both. Usage: ``python bench/engine.py [requests]``; exits 1 below the bar.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from batchsql.backends import local
from batchsql.declare.returns import parse_returns
from batchsql.types import Call, Message, ModelRef, Request, Role
from batchsql.validate.structure import AnswerValidator

BAR = 0.95
ROUNDS = 4
TEXTS = (
    "The invoice {} is wrong",
    "The app crashes when I click button {}",
    "How do I export report {}?",
    "Order {} never arrived",
)


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    model = ModelRef("local", local.PACKAGED_MODEL)
    backend = local.open_local(model, {}, Path.cwd())
    returns, mistakes = parse_returns(
        {
            "category": {"enum": ["billing", "bug", "how_to", "other"]},
            "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        }
    )
    assert not mistakes
    call = Call(model, {}, returns.object_schema(), returns.default_max_tokens())
    validator = AnswerValidator(returns)
    # The bare loop calls the engine's own function in this process: no socket, no pump.
    local._load(backend._path, backend._options)
    (server,) = local._servers
    fixed = backend._fixed_body(call)

    def prompt(number: int) -> str:
        text = TEXTS[number % len(TEXTS)].format(number)
        return f"Label this ticket with a category and an urgency from 1 to 5.\nTicket: {text}"

    def run_bare(first: int, n: int) -> float:
        def ask(number: int) -> None:
            messages = [{"role": "user", "content": prompt(number)}]
            reply = server.handle_chat_completions({**fixed, "messages": messages})
            assert reply["choices"][0]["finish_reason"] == "stop"

        started = time.perf_counter()
        with ThreadPoolExecutor(backend.capabilities.slots) as pool:
            list(pool.map(ask, range(first, first + n)))
        return n / (time.perf_counter() - started)

    tokens = [0, 0]

    def run_backend(first: int, n: int) -> float:
        requests = (
            Request(f"{number:032x}", (Message(Role.USER, prompt(number)),))
            for number in range(first, first + n)
        )
        started = time.perf_counter()
        stream = backend.complete(requests, call, threading.Event())
        completions = [completion for completion in stream if completion is not None]
        seconds = time.perf_counter() - started
        assert len(completions) == n
        assert all(validator.check(c).outcome.value == "ok" for c in completions)
        tokens[0] = sum(c.usage.output_tokens for c in completions)
        tokens[1] = sum(c.usage.input_tokens - c.usage.cached_tokens for c in completions)
        print(f"  {tokens[0] / seconds:.0f} output tokens/s, {tokens[1] / seconds:.0f} prompt")
        return n / seconds

    run_backend(0, 8)
    run_bare(100, 8)
    chunk = max(8, count // ROUNDS)
    rates: dict[str, list[float]] = {"backend": [], "bare": []}
    for turn in range(ROUNDS):
        pair = [("backend", run_backend), ("bare", run_bare)]
        for name, run in pair if turn % 2 else reversed(pair):
            first = 1_000 + (2 * turn + (name == "bare")) * 1_000
            rates[name].append(run(first, chunk))
            print(f"{name}: {rates[name][-1]:.2f} requests/s over {chunk}", flush=True)
    ratio = statistics.harmonic_mean(rates["backend"]) / statistics.harmonic_mean(rates["bare"])
    print(f"engine: requests/s of the backend / of a bare loop: {ratio:.2f} (bar {BAR})")
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
