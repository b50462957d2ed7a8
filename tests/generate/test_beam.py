"""Beam search compared with every possible completion, and with Hugging Face's beam search."""

from itertools import product

import pytest
import torch

from workhorse.generate import GenerationConfig, beam_search, generate


@torch.no_grad()
def every_text(decoder, prompt, config) -> list[tuple[float, tuple[int, ...]]]:
    """All completions of `max_new_tokens`, and shorter ones with a stop token, best first."""
    length = config.max_new_tokens
    texts = list(product(range(decoder.config.vocab_size), repeat=length))
    logits = decoder(torch.tensor([prompt + list(text) for text in texts]))[:, len(prompt) - 1 : -1]
    logprobs = logits.double().log_softmax(-1).gather(-1, torch.tensor(texts)[:, :, None])[..., 0]
    scores = {}
    for text, totals in zip(texts, logprobs.cumsum(-1).tolist(), strict=True):
        ends = [i + 1 for i, token in enumerate(text) if token in config.stop_tokens]
        n = min(ends, default=length)
        scores[text[:n]] = totals[n - 1] / n**config.length_penalty
    return sorted(((score, text) for text, score in scores.items()), reverse=True)


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
def test_with_room_for_every_text_it_finds_the_best(make_decoder, length_penalty):
    decoder = make_decoder(vocab_size=4)
    config = GenerationConfig(
        beams=64, max_new_tokens=4, length_penalty=length_penalty, stop_tokens=(3,)
    )
    prompts = [[0, 1], [2], [1, 1, 2]]
    for prompt, found in zip(prompts, beam_search(decoder, prompts, config), strict=True):
        for (score, text), completion in zip(
            every_text(decoder, prompt, config)[:5], found[:5], strict=True
        ):
            assert completion.score == pytest.approx(score, abs=1e-4)
            assert completion.tokens == text
            assert completion.finish_reason == ("eos" if text[-1] == 3 else "length")


@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.0, 1.5])
@pytest.mark.parametrize("seed", [3, 5, 8, 14])  # seeds for which the end of the search matters
def test_the_same_texts_as_transformers(
    hugging_face, make_decoder, seed, early_stopping, length_penalty
):
    decoder = make_decoder(vocab_size=6, seed=seed)
    config = GenerationConfig(
        beams=3,
        max_new_tokens=12,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        stop_tokens=(3,),
    )
    prompt = [1, 2, 4]
    expected = hugging_face(decoder).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 3, dtype=torch.int64),
        num_beams=3,
        num_return_sequences=3,
        do_sample=False,
        max_new_tokens=12,
        length_penalty=length_penalty,
        early_stopping=True if early_stopping else "never",
        eos_token_id=3,
        pad_token_id=0,
        use_cache=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    found = beam_search(decoder, [prompt], config)[0]
    for row, score, completion in zip(
        expected.sequences.tolist(), expected.sequences_scores.tolist(), found, strict=True
    ):
        assert row[3 : 3 + len(completion.tokens)] == list(completion.tokens)
        assert score == pytest.approx(completion.score, abs=1e-4)


@pytest.fixture
def hugging_face():
    """Wraps a decoder for transformers' `generate`, without a cache."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import CausalLMOutput

    class Wrapped(transformers.PreTrainedModel, transformers.GenerationMixin):
        config_class = transformers.PretrainedConfig
        main_input_name = "input_ids"

        def __init__(self, decoder):
            super().__init__(transformers.PretrainedConfig(vocab_size=decoder.config.vocab_size))
            self.decoder = decoder

        def forward(self, input_ids, attention_mask=None, **_):
            return CausalLMOutput(logits=self.decoder(input_ids))

        def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
            return {"input_ids": input_ids}

    return Wrapped


def test_a_prompt_does_not_depend_on_its_neighbours(make_decoder):
    decoder = make_decoder(vocab_size=9)
    config = GenerationConfig(beams=3, max_new_tokens=8, stop_tokens=(0, 1))
    prompts = [[2, 3, 4, 5, 6], [7], [8, 8]]
    together = beam_search(decoder, prompts, config)
    for prompt, expected in zip(prompts, together, strict=True):
        alone = beam_search(decoder, [prompt], config)[0]
        assert [c.tokens for c in alone] == [c.tokens for c in expected]
        assert [c.score for c in alone] == pytest.approx([c.score for c in expected], abs=1e-5)


def test_generate_gives_the_best_text(make_decoder, letters):
    decoder, tokenizer = make_decoder(vocab_size=9), letters(9, eos_id=0)
    config = GenerationConfig(beams=3, max_new_tokens=8)
    prompts = [[2, 3, 4, 5, 6], [7], [8, 8]]
    best = generate(decoder, prompts, config, tokenizer=tokenizer, batch_size=4)
    searched = beam_search(decoder, prompts, config, tokenizer=tokenizer)
    assert [c.tokens for c in best] == [found[0].tokens for found in searched]
    for completion in best:
        shown = [token for token in completion.tokens if token != 0]
        assert completion.text == "".join(chr(97 + token) for token in shown)


def test_the_context_ends_the_search(make_decoder):
    decoder = make_decoder(vocab_size=9, max_seq_len=6)
    found = generate(decoder, [[1, 2, 3], [4]], GenerationConfig(beams=2, max_new_tokens=50))
    assert [len(completion.tokens) for completion in found] == [4, 6]
    long = generate(
        decoder, [[1] * 9], GenerationConfig(beams=2, max_new_tokens=3, truncate="left")
    )
    assert len(long[0].tokens) == 3


def test_bias_shapes_what_is_searched(make_decoder):
    decoder = make_decoder(vocab_size=9)
    config = GenerationConfig(beams=3, max_new_tokens=5, logit_bias={4: 100.0})
    completion = generate(decoder, [[1]], config)[0]
    assert completion.tokens == (4,) * 5
    assert completion.score == pytest.approx(0, abs=1e-6)
