"""The facade: load, generate, print."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from infinigen_kv.cache.contract import CACHE_NAMES
from infinigen_kv.cache.forward import cache_argument, piece_length
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.calibration.run import calibrate
from infinigen_kv.checks import check_integer
from infinigen_kv.config import PROMPT_CHUNK, InfiniGenConfig
from infinigen_kv.errors import InfiniGenError, InputError
from infinigen_kv.memory import calibration_fields, check_memory, model_request
from infinigen_kv.models.loading import LoadedModel, load_model
from infinigen_kv.models.soundness import SoundLogits, check_known
from infinigen_kv.progress import Progress, no_progress
from infinigen_kv.session.attach import Session, attach, default_storage
from infinigen_kv.session.paper_link import paper_link_rate
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.link import LinkSpec

SINGLE: Mapping[str, Any] = MappingProxyType(
    {
        "num_return_sequences": 1,
        "return_dict_in_generate": False,
        "output_attentions": False,
        "output_hidden_states": False,
        "output_scores": False,
        "output_logits": False,
    }
)
"""Options of ``model.generate`` that a `Generation`, one text, has no room for."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A generated text; ``str()`` of it is the text alone.

    ``fetched_share`` is the mean share of the cached tokens that the speculated layers attended to,
    NaN where attention was exact throughout. ``seconds`` includes reading the prompt.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    fetched_share: float
    seconds: float

    def __str__(self) -> str:
        return self.text


class LanguageModel:
    """A model, its tokenizer and its calibration, ready to generate with a selected KV cache.

    Parameters
    ----------
    loaded
        From `load_model`.
    calibration
        Of that model; None for exact attention only.
    config
        Settings of the selection; None as in `attach`.
    storage
        Where the KV lives and how it moves; None as in `attach`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        calibration: Calibration | None,
        config: InfiniGenConfig | None = None,
        storage: StorageConfig | None = None,
    ) -> None:
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.calibration = calibration
        if config is None:
            config = InfiniGenConfig() if calibration is None else calibration.config()
        self.config = config
        if storage is None:
            storage = default_storage(calibration, config, self.model.device)
        self.storage = storage

    def encode(self, prompt: str, *, chat: bool = False) -> Tensor:
        """Token ids ``(1, T)`` of a prompt; with ``chat`` as a user's turn in its template."""
        if chat:
            if not self.tokenizer.chat_template:
                raise InputError("this model's tokenizer has no chat template: leave chat off")
            turn = [{"role": "user", "content": prompt}]
            prompt = str(
                self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
            )
        ids = self.tokenizer(prompt, add_special_tokens=not chat, verbose=False)["input_ids"]
        if not ids:
            raise InputError("the prompt is empty: give at least one token")
        tokens = torch.tensor([ids])
        check_known(tokens, self.model)
        return tokens.to(self.model.device)

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 128,
        chat: bool = False,
        full: bool = False,
        prompt_chunk: int | None = PROMPT_CHUNK,
        device_memory: int | None = None,
        streamer: BaseStreamer | None = None,
        **options: Any,
    ) -> Generation:
        """Continue a prompt.

        Parameters
        ----------
        prompt
            Text.
        max_new_tokens
            At least 1; with the prompt it must fit the model's positions.
        chat
            Put the prompt into the model's chat template.
        full
            Attend to the whole cache instead of a selection.
        device_memory
            Bytes of the device that the run may use, weights included; None for what the machine
            has.
        prompt_chunk
            Tokens of the prompt that one forward reads at most, None for all at once; see
            `cache.forward.prefill`.
        streamer
            Receives tokens as they come, e.g. `transformers.TextStreamer`.
        **options
            Passed on to ``model.generate``; greedy unless they say otherwise. What asks for more
            than one text, or for other outputs, is refused: use `attach` for that.

        Raises
        ------
        InputError
            If the prompt is empty or too long, ``max_new_tokens`` or ``prompt_chunk`` below 1, an
            option is not valid (one that names a cache, for example), or the run needs more memory
            than there is.
        InfiniGenError
            If the model computes NaN or infinity.
        """
        check_integer("max_new_tokens", max_new_tokens, 1)
        _check_options(options)
        ids = self.encode(prompt, chat=chat)
        started = time.perf_counter()
        with attach(self.model, self.calibration, self.config, self.storage) as session:
            session.check_length(ids.shape[1] + max_new_tokens)
            self._check_memory(ids, max_new_tokens, full, prompt_chunk, device_memory, options)
            recorder = FetchRecorder()
            output = _generate(
                session,
                ids,
                max_new_tokens,
                full,
                prompt_chunk,
                recorder,
                {"streamer": streamer, **options},
            )
        new = output[0, ids.shape[1] :].tolist()
        return Generation(
            text=str(self.tokenizer.decode(new, skip_special_tokens=True)),
            token_ids=tuple(new),
            prompt_tokens=ids.shape[1],
            fetched_share=recorder.fetched_share(first_layer=self.config.first_layer),
            seconds=time.perf_counter() - started,
        )

    def _check_memory(
        self,
        ids: Tensor,
        max_new_tokens: int,
        full: bool,
        prompt_chunk: int | None,
        device_memory: int | None,
        options: dict[str, Any],
    ) -> None:
        """Refuse what would not fit, before anything is computed."""
        rows = options.get("num_beams") or 1
        request = model_request(
            self.model,
            context=ids.shape[1] + max_new_tokens,
            new_tokens=max_new_tokens,
            rows=ids.shape[0] * rows,
            prompt_chunk=prompt_chunk,
            config=self.config,
            storage=self.storage,
            policies=("stream" if full else "infinigen",),
            **calibration_fields(self.calibration),
        )
        check_memory(request, device_memory=device_memory, fixed=() if rows > 1 else ("rows",))


def load(
    name: str,
    *,
    config: InfiniGenConfig | None = None,
    storage: StorageConfig | None = None,
    calibration: Calibration | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    progress: Progress = no_progress,
) -> LanguageModel:
    """Load a model by name and calibrate it, unless that was done before.

    >>> llm = load("smollm2")
    >>> print(llm.generate("Once upon a time", max_new_tokens=32))

    Parameters
    ----------
    name
        As in `load_model`: ``smollm2``, a folder, a ``.gguf`` file or a hub name.
    config
        Settings of the selection; None as in `attach`.
    storage
        Where the KV lives and how it moves; None as in `attach`.
    calibration
        None makes one from the default text and keeps it in the user's cache folder.
    dtype, device, trust_remote_code
        As in `load_model`.
    progress
        Shows the calibration's progress, e.g. `infinigen_kv.progress.bar`.
    """
    loaded = load_model(name, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    made = calibration or calibrate(loaded.model, loaded.tokenizer, progress=progress)
    return LanguageModel(loaded, made, config, storage)


def _check_options(options: dict[str, Any]) -> None:
    """That they leave the cache to this package, and ask for one text."""
    for name in (*CACHE_NAMES, "cache_implementation"):
        if options.get(name) is not None:
            raise InputError(
                f"{name} is not valid here: generate makes a cache of its own, as config and "
                "storage say. For another one, use model.generate of an attached model"
            )
    for name, value in SINGLE.items():
        if options.get(name) not in (None, value):
            raise InputError(
                f"{name}={options[name]!r} is not valid here, where one text is returned: leave it "
                "out, or use attach(...) and model.generate"
            )


def _generate(
    session: Session,
    ids: Tensor,
    max_new_tokens: int,
    full: bool,
    prompt_chunk: int | None,
    recorder: FetchRecorder,
    options: dict[str, Any],
) -> Tensor:
    total = ids.shape[1] + max_new_tokens
    rate = None
    if LinkSpec.parse(session.storage.link).is_paper:
        rate = paper_link_rate(session, context=ids.shape[1])
    cache = session.new_cache(
        tokens=total, policy="stream" if full else "infinigen", link_rate=rate
    )
    piece = piece_length(session, cache, ids.shape[1], prompt_chunk)
    if piece < ids.shape[1]:
        options = {"prefill_chunk_size": piece, **options}
    cache.expect_prompt(ids.shape[1])
    cache.recorder = recorder
    settings = {
        cache_argument(session.model): cache,
        "do_sample": False,
        "num_beams": 1,
        **options,
        **SINGLE,
        "logits_processor": [SoundLogits(), *(options.get("logits_processor") or ())],
    }
    model: Any = session.model  # not every class of Transformers can generate
    try:
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **settings
        )
    except ValueError as error:
        if isinstance(error, InfiniGenError) or cache.get_seq_length() > 0:
            raise
        raise InputError(
            f"the options of generate, or those of the model's generation_config, are not valid: "
            f"{error}"
        ) from error
