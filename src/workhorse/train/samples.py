"""Texts generated while training."""

from textwrap import shorten

from workhorse.data import Beginning, DataConfig
from workhorse.errors import WorkhorseError
from workhorse.generate import GenerationConfig, generate
from workhorse.nn import Decoder
from workhorse.tokenizers import Tokenizer
from workhorse.train.recipe.recipe import SamplesConfig


class Sampler:
    """Continues the recipe's prompts, with the same random numbers each time.

    It has its own random generators, so it does not affect training.

    Args:
        decoder: the model in training.
        tokenizer: of the decoder.
        config: the prompts, and how tokens are chosen.
        begin: how texts begin in training.

    Raises:
        WorkhorseError: a prompt is empty, and texts begin without a token of their own in training.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, config: SamplesConfig, begin: Beginning
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.prompts = config.prompts
        self.tokens = [begin.encode(tokenizer, prompt) for prompt in config.prompts]
        if not all(self.tokens):
            raise _no_beginning()
        self.generation = GenerationConfig(
            max_new_tokens=config.max_new_tokens, temperature=config.temperature, seed=config.seed
        )
        for prompt, tokens in zip(self.prompts, self.tokens, strict=True):
            if len(tokens) > decoder.max_seq_len:  # now, and not hours later
                raise WorkhorseError(
                    f"the sample prompt {shorten(prompt, 40)!r} has {len(tokens)} tokens and the "
                    f"context is {decoder.max_seq_len}; shorten it in train.samples.prompts"
                )

    def __call__(self) -> list[dict[str, str]]:
        """A `prompt` and the `text` that follows it, for each prompt."""
        completions = generate(self.decoder, self.tokens, self.generation, tokenizer=self.tokenizer)
        return [
            {"prompt": prompt, "text": completion.text}
            for prompt, completion in zip(self.prompts, completions, strict=True)
        ]


def check_samples(config: SamplesConfig | None, data: DataConfig) -> None:
    """Refuse an empty prompt if the recipe already tells that no token begins a text.

    Raises:
        WorkhorseError: there is an empty prompt.
    """
    if config is not None and "" in config.prompts and not (data.bos or data.eos):
        raise _no_beginning()


def _no_beginning() -> WorkhorseError:
    return WorkhorseError(
        "train.samples has an empty prompt, which begins a text, and the training puts neither bos "
        "nor eos between texts; write a prompt, or set data.eos=true"
    )
