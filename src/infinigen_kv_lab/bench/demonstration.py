"""The prompt of the demo: a long passage of documentation and a question about it."""

from __future__ import annotations

from pydoc_data.topics import topics

from transformers import PreTrainedTokenizerBase

TOPICS = ("string-methods",)
PROMPT_TOKENS = 6_000
QUESTION = "What does the method `str.find` return if the substring is not found? Give an example."


def demo_prompt(
    tokenizer: PreTrainedTokenizerBase,
    question: str = QUESTION,
    names: tuple[str, ...] = TOPICS,
    tokens: int = PROMPT_TOKENS,
) -> list[int]:
    """Token ids of a user's turn: the topics' documentation, cut to fit, and the question.

    Parameters
    ----------
    tokenizer
        Of a model with a chat template.
    names
        Topics of ``pydoc_data.topics``.
    tokens
        About the prompt's length; it is shorter where the topics are.
    """
    passage = "\n\n".join(topics[name] for name in names)
    ids = tokenizer(passage, add_special_tokens=False, verbose=False)["input_ids"]
    around = tokenizer(_turn(tokenizer, "", question), add_special_tokens=False)["input_ids"]
    passage = str(tokenizer.decode(ids[: tokens - len(around)]))
    whole = tokenizer(_turn(tokenizer, passage, question), add_special_tokens=False, verbose=False)
    found: list[int] = whole["input_ids"]
    return found


def _turn(tokenizer: PreTrainedTokenizerBase, passage: str, question: str) -> str:
    content = f"Python documentation:\n\n{passage}\n\n{question}"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return text
