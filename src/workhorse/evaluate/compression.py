"""General-purpose compressors on the same bytes: a yardstick for bits per byte."""

import lzma
import zlib
from collections.abc import Iterable

_GZIP_FORMAT = 16 + zlib.MAX_WBITS  # zlib's way to say "with gzip's header"


def compressed_bits_per_byte(texts: Iterable[str]) -> dict[str, float]:
    """Bits per byte of the concatenated UTF-8 texts under `gzip -9` and `xz -9`.

    The texts are compressed as one stream in the order given, so a compressor may use earlier
    texts, as far as its window reaches (32 KiB and 64 MiB).

    Returns:
        `{"gzip": ..., "xz": ...}`; zeros if there are no bytes.
    """
    gzip = zlib.compressobj(9, zlib.DEFLATED, _GZIP_FORMAT)
    xz = lzma.LZMACompressor(preset=9)
    n_bytes, sizes = 0, {"gzip": 0, "xz": 0}
    for text in texts:
        data = text.encode()
        n_bytes += len(data)
        sizes["gzip"] += len(gzip.compress(data))
        sizes["xz"] += len(xz.compress(data))
    sizes["gzip"] += len(gzip.flush())
    sizes["xz"] += len(xz.flush())
    return {name: 8 * size / n_bytes if n_bytes else 0.0 for name, size in sizes.items()}
