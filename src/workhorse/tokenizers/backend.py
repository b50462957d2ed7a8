"""The tokenizer of the `tokenizers` library that a `tokenizer.json` describes, or a refusal."""

from collections.abc import Sequence

import tokenizers

from workhorse.errors import WorkhorseError

MAX_TOKEN_ID = 2**21
"""No vocabulary comes near; tables as long as a larger id would fill the memory."""


def library_tokenizer(definition: str) -> tokenizers.Tokenizer:
    """The library's tokenizer, without truncation and padding.

    Raises:
        WorkhorseError: not such a text, or ids beyond `MAX_TOKEN_ID`.
    """
    try:
        backend = tokenizers.Tokenizer.from_str(definition)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and worse when it panics
        raise WorkhorseError(
            f"not a tokenizer.json ({' '.join(str(error).split())[:200]}); give a file that the "
            "tokenizers library wrote"
        ) from None
    backend.no_truncation()
    backend.no_padding()
    if max(backend.get_vocab().values(), default=0) > MAX_TOKEN_ID:
        raise WorkhorseError(f"token ids beyond {MAX_TOKEN_ID:,}; no vocabulary is that large")
    return backend


def ids_of(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of several texts, nothing put before or after them.

    Raises:
        WorkhorseError: a text holds half a surrogate pair, which no UTF-8 can say.
    """
    try:
        found = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    except TypeError:
        _check_texts(texts)
        raise
    return [encoding.ids for encoding in found]


def _check_texts(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise WorkhorseError(
                f"the text holds half a surrogate pair, {text[error.start]!r}, at character "
                f"{error.start}; read it with errors='replace', or encode its bytes"
            ) from None
