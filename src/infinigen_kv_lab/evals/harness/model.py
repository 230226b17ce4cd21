"""The engine as a model of lm-evaluation-harness, ``--model infinigen_kv``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.calibration.run import calibrate
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv.models.loading import load_model
from infinigen_kv.policies.registry import check_policy
from infinigen_kv.policies.settings import BUDGET
from infinigen_kv.progress import Progress, bar, no_progress
from infinigen_kv.session.attach import attach
from infinigen_kv_lab.evals.harness.scoring import Score, generate, score
from infinigen_kv_lab.evals.reading import FULL, Reader

NAME = "infinigen_kv"
DEFAULT_NEW_TOKENS = 256  # where a task sets no limit, as in the harness's own models
DEFAULT_WINDOW = 2048  # of rolling log-likelihoods, for models that name no limit

Readers = Callable[[], AbstractContextManager[Reader]]
"""Opens a reader on an attached model."""


class InfiniGenLM(TemplateLM):
    """Answers the harness's requests, one at a time, through a `Reader`.

    Parameters
    ----------
    readers
        Opens the reader that a call of the harness uses.
    tokenizer
        The model's.
    exact_prefix
        Tokens at the start of every request that are read in full; later ones select.
    max_length
        Longest text in tokens.
    add_bos_token
        Whether texts start with the BOS token; None for the tokenizer's own way.
    progress
        Wraps the list of requests.
    """

    def __init__(
        self,
        readers: Readers,
        tokenizer: PreTrainedTokenizerBase,
        *,
        exact_prefix: int,
        max_length: int,
        add_bos_token: bool | None = None,
        progress: Progress = no_progress,
    ) -> None:
        super().__init__()
        self.tokenizer: Any = tokenizer
        self._readers = readers
        self._exact = exact_prefix
        self._max_length = max_length
        self._add_bos = add_bos_token
        self._progress = progress

    @property
    def eot_token_id(self) -> int:
        end = self.tokenizer.eos_token_id
        if end is None:
            raise InputError(
                "the tokenizer has neither a BOS nor an EOS token to start a text with"
            )
        return int(end)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        """Longest text in tokens."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """Longest answer in tokens, where a task sets no limit."""
        return DEFAULT_NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unused: Any
    ) -> list[int]:
        special = self._add_bos if add_special_tokens is None else add_special_tokens
        bos = self.tokenizer.bos_token
        if bos and add_special_tokens is None and string.startswith(bos):
            special = False
        options = {} if special is None else {"add_special_tokens": special}
        return list(self.tokenizer(string, verbose=False, **options)["input_ids"])

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        totals = []
        with self._readers() as reader:
            for (text,) in self._shown([each.args for each in requests], disable_tqdm):
                windows = get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
                pairs = [make_disjoint_window(window) for window in windows]
                scores = [
                    score(reader, context, [predicted], exact=self._exact)[0]
                    for context, predicted in pairs
                ]
                totals.append(sum(value for value, _ in scores))
                self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        answers = []
        with self._readers() as reader:
            for context, options in self._shown([each.args for each in requests], disable_tqdm):
                answers.append(self._answer(reader, context, dict(options)))
                self.cache_hook.add_partial("generate_until", (context, options), answers[-1])
        return answers

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, **unused: Any
    ) -> list[Score]:
        """Requests are ``(texts, context ids, continuation ids)``; equal contexts in a row are
        read once.
        """
        scores: list[Score] = []
        with self._readers() as reader:
            for group in self._shown(_by_context(requests), disable_tqdm):
                context = group[0][1]
                found = score(reader, context, [each[2] for each in group], exact=self._exact)
                scores += found
                for (texts, *_), each in zip(group, found, strict=True):
                    self.cache_hook.add_partial("loglikelihood", texts, each)
        return scores

    def _answer(self, reader: Reader, context: str, options: dict[str, Any]) -> str:
        if options.get("do_sample") and options.get("temperature", 1.0) > 0:
            raise InputError("generate_until with do_sample=true: this model only answers greedily")
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else [stop for stop in stops if stop]

        def text_of(tokens: list[int]) -> str:
            return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

        made = generate(
            reader,
            self.tok_encode(context),
            exact=self._exact,
            new_tokens=int(options.get("max_gen_toks", self.max_gen_toks)),
            end_tokens={self.tokenizer.eos_token_id} - {None},
            is_over=lambda tokens: any(stop in text_of(tokens) for stop in stops),
        )
        answer = text_of(made)
        for stop in stops:
            answer = answer.partition(stop)[0]
        return answer

    def _shown(self, items: Sequence[Any], hidden: bool) -> Any:
        return items if hidden else self._progress(items, "requests")


@register_model(NAME)
class LoadedInfiniGenLM(InfiniGenLM):
    """`InfiniGenLM` as the harness makes it from ``--model_args``.

    Parameters
    ----------
    pretrained
        As in `load_model`: ``smollm2``, a folder, a ``.gguf`` file or a hub name.
    policy, budget
        One of `policies.registry.POLICIES`, and what those with a fixed budget may use.
    exact_prefix
        Tokens at the start of every request that are read in full.
    calibration
        Folder of a calibration; None for the one in the user's cache, made where there is none.
    dtype, device, trust_remote_code
        As in `load_model`; the dtype by name. The harness asks for ``cuda:0`` unless told
        otherwise: without a CUDA device that means the CPU.
    batch_size, max_batch_size
        What the harness passes; requests are read one by one whatever it is.
    **settings
        Fields of `InfiniGenConfig`. ``min_context`` is ``exact_prefix`` unless given.

    Raises
    ------
    InputError
        If a value is not right.
    """

    def __init__(
        self,
        pretrained: str,
        policy: str = "infinigen",
        *,
        budget: float = BUDGET,
        exact_prefix: int = 128,
        calibration: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        trust_remote_code: bool = False,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        batch_size: Any = 1,
        max_batch_size: Any = None,
        **settings: Any,
    ) -> None:
        check_policy(policy)
        settings = {"min_context": exact_prefix, **settings}
        config = InfiniGenConfig.from_dict(settings)
        loaded = load_model(
            pretrained,
            dtype=_dtype(dtype),
            device=_device(device),
            trust_remote_code=trust_remote_code,
        )
        made = _calibration(loaded.model, loaded.tokenizer, calibration, policy)
        if made is not None:
            config = made.config(**settings)

        @contextmanager
        def readers() -> Iterator[Reader]:
            with attach(loaded.model, made, config) as session:
                yield Reader(session, policy, budget=budget)

        positions = getattr(loaded.model.config, "max_position_embeddings", None)
        super().__init__(
            readers,
            loaded.tokenizer,
            exact_prefix=exact_prefix,
            max_length=max_length or positions or DEFAULT_WINDOW,
            add_bos_token=add_bos_token,
            progress=bar,
        )


def _by_context(requests: Sequence[Any]) -> list[list[Any]]:
    groups: list[list[Any]] = []
    for request in requests:
        if groups and groups[-1][0][1] == request[1]:
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups


def _calibration(
    model: Any, tokenizer: PreTrainedTokenizerBase, folder: str | None, policy: str
) -> Calibration | None:
    if folder is not None:
        return Calibration.load(Path(folder))
    return None if policy == FULL else calibrate(model, tokenizer, progress=bar)


def _device(name: str | None) -> str:
    import torch

    if name is None or (name.startswith("cuda") and not torch.cuda.is_available()):
        return "cpu"
    return name


def _dtype(name: str | None) -> Any:
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name in (None, "auto"):
        return None
    if name not in known:
        raise InputError(f"dtype={name!r} is not valid: it must be one of {', '.join(known)}")
    return known[name]
