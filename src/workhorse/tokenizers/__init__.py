"""Tokenizers, from text to token ids and back: train, load, save and measure them.

tokenizer = train_tokenizer(BpeConfig(vocab_size=4096), texts)
ids = tokenizer.encode("Hello")
"""

from workhorse.tokenizers.chat.template import ChatTemplate
from workhorse.tokenizers.config import (
    BpeConfig,
    ByteFallbackBpeConfig,
    BytesConfig,
    CharactersConfig,
    FileConfig,
    SpecialTokensConfig,
    TokenizerConfig,
    UnigramConfig,
    WordPieceConfig,
    WordsConfig,
    tokenizer_config,
)
from workhorse.tokenizers.files import check_output_folder
from workhorse.tokenizers.load import load_tokenizer
from workhorse.tokenizers.pieces import StreamDecoder
from workhorse.tokenizers.report import TokenizerReport, tokenizer_report
from workhorse.tokenizers.tokenizer import Piece, Tokenizer
from workhorse.tokenizers.training import missing_tokens, train_tokenizer

__all__ = [
    "BpeConfig",
    "ByteFallbackBpeConfig",
    "BytesConfig",
    "CharactersConfig",
    "ChatTemplate",
    "FileConfig",
    "Piece",
    "SpecialTokensConfig",
    "StreamDecoder",
    "Tokenizer",
    "TokenizerConfig",
    "TokenizerReport",
    "UnigramConfig",
    "WordPieceConfig",
    "WordsConfig",
    "check_output_folder",
    "load_tokenizer",
    "missing_tokens",
    "tokenizer_config",
    "tokenizer_report",
    "train_tokenizer",
]
