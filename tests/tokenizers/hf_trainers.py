"""Small tokenizers with the same steps as published ones, trained on a few kB."""

import io
import json
from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPACE = "\u2581"
TEXTS = [
    "The quick brown fox jumps over the lazy dog. The dog, lazy as ever, did not jump.\n" * 8,
    "def jump(self, over=None):\n    if over is None:\n        return 12345\n    return over\n" * 8,
    "Größe, naïve café, 東京 and Москва; हिन्दी: 100 % «done» 🦊 user assistant system\n" * 4,
    "user\nHello there\nassistant\nI am well, thank you; how are you?\n" * 8,
]
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")


def byte_level(
    special: list[str],
    words: str | None = None,
    normalizer: Any = None,
    first: bool = True,
    **flags: Any,
) -> Tokenizer:
    """BPE over bytes, as in GPT-2, Llama 3, Qwen, Falcon and BLOOM."""
    tokenizer = Tokenizer(models.BPE(**flags))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    tokenizer.pre_tokenizer = (
        level
        if words is None
        else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), level])
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special if first else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if not first:
        tokenizer.add_special_tokens(special)
    return tokenizer


def with_bos(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    number = tokenizer.token_to_id(bos)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, number)]
            ),
        ]
    )
    return tokenizer


def sentencepiece_model(**options: Any) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in TEXTS for line in text.splitlines()),
        model_writer=model,
        model_type="bpe",
        byte_fallback=True,
        vocab_size=420,
        hard_vocab_limit=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return model.getvalue()


def byte_fallback(special: list[str], legacy: bool = False, prefix: bool = True) -> Tokenizer:
    """BPE over characters, as in LLaMA, Mistral (both add a space before the input) and Gemma."""
    trainer = trainers.BpeTrainer(
        vocab_size=520,
        special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    tokenizer = Tokenizer(models.BPE(unk_token=special[0], fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    tokenizer.train_from_iterator(TEXTS, trainer)
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = fields["added_tokens"][: len(special)]
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if not prefix:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
        tokenizer.pre_tokenizer = None
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def template_bos(tokenizer: Tokenizer, bos: str, eos: str | None = None) -> Tokenizer:
    names = [bos] + ([] if eos is None else [eos])
    single = f"{bos}:0 $A:0" + ("" if eos is None else f" {eos}:0")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single} {bos}:1 $B:1" + ("" if eos is None else f" {eos}:1"),
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in names],
    )
    return tokenizer


def words_with_ends() -> Tokenizer:
    """BPE over lower-case words, with an end-of-word suffix, as in GPT."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def unigram_after_eos() -> Tokenizer:
    """Unigram that adds eos at the beginning, as in XGLM."""
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always")
    tokenizer.decoder = decoders.Metaspace(SPACE, "always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=names, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([f"<madeupword{number}>" for number in range(7)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A </s> </s> $B", special_tokens=[("</s>", 2)]
    )
    return tokenizer
