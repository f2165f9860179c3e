"""A conversation that a session's file carries from one call of `deltanet-hf generate` to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from deltanet_hf.errors import UserError, one_line
from deltanet_hf.sessions.session_file import Session, load_session

MESSAGE, REPLY = "a message before", "a reply in between"  # stand for the words that the session already holds


def continued(path: Path, model: PreTrainedModel, tokenizer: Any, prompt: str, chat: bool) -> Session:
    """The session in the file `path`, with the tokens of a further prompt, which its cache has not read.

    Args:
        chat: whether the prompt is a message of the chat template, if there is one.

    Raises:
        UserError: see `load_session` and `further_turn`; or a session of several texts.
    """
    session = load_session(path, model)
    if len(session.input_ids) > 1:
        raise UserError(f"{path}: has {len(session.input_ids)} texts; this command goes on with one only")
    new = further_turn(tokenizer, prompt, chat, int(session.input_ids[0, -1])).to(model.device)
    session.input_ids = torch.cat([session.input_ids, new], dim=1)
    session.attention_mask = torch.cat([session.attention_mask, torch.ones_like(new)], dim=1)
    return session


def first_turn(tokenizer: Any, prompt: str, chat: bool) -> Tensor:
    """Tokens [1, T] of the prompt, as the first message of the chat template if `chat` and there is one.

    Raises:
        UserError: the template fails.
    """
    if chat and tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        inputs = _templated(tokenizer, turns, return_tensors="pt", return_dict=True)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    ids: Tensor = inputs["input_ids"]
    return ids


def _templated(tokenizer: Any, turns: list[dict[str, str]], **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, **options)
    except Exception as error:  # of any type: a template is a program
        raise UserError(f"the chat template of this model fails ({one_line(error, 200)}); use --no-chat") from error


def further_turn(tokenizer: Any, prompt: str, chat: bool, last: int) -> Tensor:
    """Tokens [1, T] that go on behind what has been said: the prompt, with what the chat template puts around it.

    Args:
        last: the last token so far. The template ends a reply with a token that the model may have written itself.

    Raises:
        UserError: the template fails or does not give replies back as they are, or nothing remains of the prompt.
    """
    text, templated = prompt, chat and tokenizer.chat_template
    if templated:
        turns = [{"role": "user", "content": MESSAGE}, {"role": "assistant", "content": REPLY}]
        turns.append({"role": "user", "content": prompt})
        rendered: str = _templated(tokenizer, turns, tokenize=False)
        _, found, text = rendered.partition(REPLY)
        if not found:
            raise UserError("--session: the chat template of this model leaves out replies; use --no-chat")
    ids: Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    special = last in tokenizer.all_special_ids or last in tokenizer.added_tokens_decoder
    if templated and special and ids[0, :1].tolist() == [last]:
        ids = ids[:, 1:]
    if ids.shape[1] == 0:
        raise UserError("--prompt: has no tokens; give some text to go on with")
    return ids.long()
