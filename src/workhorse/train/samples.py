"""Texts generated while training."""

from workhorse.generate import GenerationConfig, generate
from workhorse.nn import Decoder
from workhorse.tokenizers import Tokenizer
from workhorse.train.recipe import SamplesConfig


class Sampler:
    """Continues the recipe's prompts, with the same random numbers each time.

    It draws from generators of its own, so training goes on as if it had not run.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, config: SamplesConfig) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.prompts = config.prompts
        start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        self.tokens = [
            tokenizer.encode(prompt) or [0 if start is None else start] for prompt in config.prompts
        ]
        self.generation = GenerationConfig(
            max_new_tokens=config.max_new_tokens, temperature=config.temperature, seed=config.seed
        )

    def __call__(self) -> list[dict[str, str]]:
        """A `prompt` and the `text` that follows it, for each prompt."""
        completions = generate(self.decoder, self.tokens, self.generation, tokenizer=self.tokenizer)
        return [
            {"prompt": prompt, "text": completion.text}
            for prompt, completion in zip(self.prompts, completions, strict=True)
        ]
