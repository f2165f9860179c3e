"""The model class `deltanet-hf` of lm-eval, which loads converted models and their teachers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm.auto import tqdm
from transformers import PreTrainedModel

import deltanet_hf  # noqa: F401  registers the model families with transformers' Auto classes
from deltanet_hf.cpu_dtype import loading_dtype
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.continuations import TokenRequest, score_continuations, token_budget
from deltanet_hf.evaluation.tasks.kept_answers import KeptAnswers
from deltanet_hf.mixers.window import WindowSettings
from deltanet_hf.models.cache_bits import cache_bits_of
from deltanet_hf.models.restrict import restrict_to_window
from deltanet_hf.sessions.model_identity import model_identity

_LOGGER = logging.getLogger(__name__)
_WITHOUT_EFFECT = ("batch_size", "max_batch_size", "device", "dtype")  # on answers; the model itself has its dtype
# Number of tokens that a row counts for where batches are counted in rows.
_TOKENS_PER_ROW = 512


@register_model("deltanet-hf")
class DeltaNetLM(HFLM):
    """lm-eval's model class `hf` for converted models and their teachers.

    Prompts, tokenisation and scores are those of `hf` with `softmax_dtype=float32` (sums in bfloat16 round, and give
    ties). Equal inputs are evaluated once and only the positions of continuations are normalised, which is several
    times faster.

    Args:
        window: number of recent tokens that every softmax layer may see; None for no restriction.
        sinks: number of first tokens that stay visible under `window`.
        answers: file that keeps the answers, from which an interrupted evaluation continues; None for no file.
        kwargs: arguments of `hf`.

    Raises UserError if the file of answers cannot be used.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        window: int | None = None,
        sinks: int = WindowSettings.sinks,
        answers: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(pretrained, **kwargs)
        parameters = inspect.signature(self.model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._contexts: dict[str, list[int]] = {}
        self._answers: KeptAnswers | None = None
        if answers is not None:
            if self.world_size > 1:
                raise UserError("--answers: works with one process only; leave it out")
            owner = {
                **model_identity(self.model),
                "cache_bits": cache_bits_of(self.model),
                "window": window and [int(window), int(sinks)],
                "model_args": {name: str(value) for name, value in kwargs.items() if name not in _WITHOUT_EFFECT},
            }
            self._answers = KeptAnswers(Path(answers), owner)
        if window is not None:
            restrict_to_window(self.model, int(window), int(sinks))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._kept("loglikelihood", super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return self._kept("loglikelihood_rolling", super().loglikelihood_rolling, requests, disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return self._kept("generate_until", super().generate_until, requests, disable_tqdm)

    def _kept(self, kind: str, ask: Callable[..., list[Any]], requests: list[Any], disable_tqdm: bool) -> list[Any]:
        """The answers of `hf`, of which those in the file are not computed again."""
        if self._answers is None:
            return ask(requests, disable_tqdm=disable_tqdm)
        return self._answers.answer(kind, requests, partial(ask, disable_tqdm=disable_tqdm))

    def _create_model(self, *args: Any, dtype: Any = "auto", **kwargs: Any) -> None:
        """As in `hf`; with the default dtype, a CPU without bfloat16 computes in float32."""
        super()._create_model(*args, dtype=loading_dtype(dtype, self._device), **kwargs)

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """As in `hf`, with the last contexts cached, because the options of a question share theirs."""
        if add_special_tokens is not None or left_truncate_len is not None or kwargs:
            return super().tok_encode(string, add_special_tokens, left_truncate_len, **kwargs)
        if string not in self._contexts:
            if len(self._contexts) >= 8:
                self._contexts.pop(next(iter(self._contexts)))
            self._contexts[string] = super().tok_encode(string)
        return list(self._contexts[string])

    def tokenise(self, instances: Sequence[Any]) -> list[tuple[Any, list[int], list[int]]]:
        """(None, context ids, continuation ids) of each log-likelihood request, split where lm-eval splits them."""
        encoded = []
        for instance in instances:
            context, continuation = instance.args
            if context:
                context_ids, ids = self._encode_pair(context, continuation)
            else:
                ids = self.tok_encode(continuation, add_special_tokens=False)
                starts_itself = ids[0] == self.prefix_token_id
                context_ids, ids = (ids[:1], ids[1:]) if starts_itself else ([self.prefix_token_id], ids)
            encoded.append((None, context_ids, ids))
        return encoded

    def score_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]]) -> list[tuple[float, bool]]:
        """(log-probability in nats, whether greedy decoding gives it) of each continuation from `tokenise`."""
        return self._loglikelihood_tokens(requests)

    def _detect_batch_size(self, requests: Sequence | None = None, pos: int = 0) -> int:
        """Rows per batch for `batch_size=auto` in generation and rolling windows.

        The stock search first tries 64 rows of the longest context, which takes minutes on a CPU.
        """
        return max(1, token_budget(self.model) // _TOKENS_PER_ROW)

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
        **unused: Any,
    ) -> list[tuple[float, bool]]:
        if self.backend != "causal":
            return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)
        rows = None if self.batch_size == "auto" else int(override_bs or self.batch_size)
        items = [
            TokenRequest.truncated(context, continuation, self.max_length) for _, context, continuation in requests
        ]
        if cut := sum(len(context) + len(ids) > self.max_length + 1 for _, context, ids in requests):
            _LOGGER.warning(
                "%d of %d requests are longer than the model's %d tokens and lose their beginning",
                cut,
                len(requests),
                self.max_length,
            )
        bar = tqdm(total=len(items), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        answers = score_continuations(
            self._last_logits, items, self.device, token_budget(self.model), rows, on_progress=bar.update
        )
        bar.close()
        for (key, _, _), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def _last_logits(self, input_ids: torch.Tensor, keep: int) -> torch.Tensor:
        """Logits [B, keep, V] of the last `keep` positions of right-padded ids [B, T]."""
        kwargs: dict[str, Any] = {"logits_to_keep": keep} if self._keeps_logits else {}
        with torch.autocast(
            self.device.type, dtype=self.mixed_precision_dtype, enabled=self.mixed_precision_dtype is not None
        ):
            return self.model(input_ids, use_cache=False, **kwargs).logits[:, -keep:]
