"""Renders chats as tokens and marks the assistant's replies, which are learned."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from deltanet_hf.errors import UserError, one_line


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], separator: int
) -> tuple[np.ndarray, np.ndarray]:
    """The token ids [n] int64 of a chat in the tokenizer's template, with the separator at the end, and `scored` [n].

    `scored` is True for the tokens of replies. A reply is what the template adds between the prompt with the generation
    header and the prompt with the reply, so it includes the token that ends the turn. Raises UserError if a chat is no
    list of messages, if there is no template, or if the template refuses it or rewrites earlier turns.
    """
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
    ):
        raise UserError("data: messages_key must name a list of messages, each with a role and a content")
    if not tokenizer.chat_template:
        raise UserError("data: messages_key needs a chat template, and the tokenizer has none")
    ids: list[int] = []
    scored: list[bool] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:turn], header=True)
        full = _render(tokenizer, messages[: turn + 1], header=False)
        if full[: len(prompt)] != prompt or prompt[: len(ids)] != ids:
            raise UserError("data: the chat template changes earlier turns; use sources with one reply per chat")
        scored += [False] * (len(prompt) - len(ids)) + [True] * (len(full) - len(prompt))
        ids = full
    return np.array([*ids, separator], dtype=np.int64), np.array([*scored, False])


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], header: bool) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=header, tokenize=False)
    except Exception as error:  # templates are programs, and refuse chats by exceptions of their own
        roles = ", ".join(str(message["role"]) for message in messages)
        raise UserError(
            f"data: the chat template cannot render a chat with the roles {roles} ({one_line(error, 200)}); leave such "
            "chats out"
        ) from None
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
