"""Asks a converted model that vLLM serves, by its OpenAI interface; needs no package.

vllm serve OUT                        # in another terminal, with the extra vllm (docs/serving.md)
python examples/vllm_client.py "What is photosynthesis?" [http://localhost:8000]
"""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.request import Request, urlopen


def call(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON answer of a server to a request: GET without a body, else POST."""
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"})) as answer:
        return json.load(answer)


def main(prompt: str, server: str = "http://localhost:8000") -> None:
    model = call(f"{server}/v1/models")["data"][0]["id"]
    messages = [{"role": "user", "content": prompt}]
    answer = call(f"{server}/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 200})
    print(answer["choices"][0]["message"]["content"])
    print(f"{model}: {answer['usage']['completion_tokens']} tokens", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
