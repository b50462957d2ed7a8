"""`workhorse.load`: a model by the name of what holds it, with its tokenizer."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workhorse.checkpoints import RunDirectory
from workhorse.config import nearest
from workhorse.data import DataConfig
from workhorse.devices import resolve_device
from workhorse.errors import WorkhorseError
from workhorse.generate import Completion, Delta, GenerationConfig, PrefixCache, generate, stream
from workhorse.models import preset, preset_names
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.kernels import KernelName
from workhorse.tokenizers import BytesConfig, Tokenizer, train_tokenizer


@dataclass(frozen=True)
class Model:
    """A decoder and what is needed to use it with text."""

    name: str
    """What it was loaded from."""
    decoder: Decoder
    tokenizer: Tokenizer
    trained: bool
    """Whether the weights were learned; those of a preset are random."""
    data: DataConfig | None = None
    """What a run was trained on."""
    trained_to_chat: bool = False
    """Whether it knows its tokenizer's chat template; what was trained on plain text does not."""

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config

    @property
    def bos(self) -> int | None:
        """The token that begins every text the model was trained on."""
        return self.tokenizer.bos_id if self.data and self.data.bos else None

    @property
    def start(self) -> int | None:
        """The token that training put before a text: bos, or the eos of the text before it."""
        if self.bos is not None:
            return self.bos
        return self.tokenizer.eos_id if self.data and self.data.eos else None

    def encode(self, prompt: str) -> list[int]:
        """A prompt's tokens as training would have begun them.

        A text begins with bos where training began it so. An empty prompt asks for a text from its
        beginning, which after training without bos is the eos of the one before.
        """
        tokens = self.tokenizer.encode(prompt)
        first = self.bos if tokens else self.start
        return tokens if first is None else [first, *tokens]

    def generate(
        self, prompt: str | Sequence[int], config: GenerationConfig | None = None, **options: Any
    ) -> Completion:
        """Continue one prompt: a text, or token ids.

        Args:
            prompt: what to continue.
            config: how; or give `options`, the fields of `GenerationConfig`.
            options: see `config`.

        Raises:
            WorkhorseError: as `workhorse.generate.generate`; or `n_samples` above 1.
        """
        config = _config(config, options)
        if config.n_samples > 1:
            raise WorkhorseError(
                f"n_samples={config.n_samples} gives several texts; use generate_batch([prompt])"
            )
        return self.generate_batch([prompt], config)[0]

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        config: GenerationConfig | None = None,
        *,
        batch_size: int = 32,
        **options: Any,
    ) -> list[Completion]:
        """Continue several prompts, see `workhorse.generate.generate`."""
        return generate(
            self.decoder,
            [self._tokens(prompt) for prompt in prompts],
            _config(config, options),
            tokenizer=self.tokenizer,
            batch_size=batch_size,
        )

    def stream(
        self,
        prompt: str | Sequence[int],
        config: GenerationConfig | None = None,
        *,
        prefix: PrefixCache | None = None,
        **options: Any,
    ) -> Iterator[Delta]:
        """Continue one prompt, giving each token as it is chosen."""
        return stream(
            self.decoder,
            [self._tokens(prompt)],
            _config(config, options),
            tokenizer=self.tokenizer,
            prefix=prefix,
        )

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        return self.encode(prompt) if isinstance(prompt, str) else list(prompt)


def load(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kernel: KernelName = "auto",
    tell: Callable[[str], object] = warnings.warn,
) -> Model:
    """A model from a run directory, or a preset with random weights.

    Args:
        model: the folder of a run, or a preset's name (see `workhorse models list`).
        device: a PyTorch device; `auto` is CUDA where there is a device and else the CPU.
        dtype: a PyTorch floating-point type; `auto` is float32.
        kernel: how attention is computed.
        tell: called with what must not go unnoticed: that weights are random.

    Raises:
        WorkhorseError: there is no such model, it cannot be read, or the device or type is not
            there.
    """
    where, precision = resolve_device(device), _dtype(dtype)
    path = Path(model)
    if path.is_dir():
        return _run(path, where, precision, kernel)
    if path.exists():
        raise WorkhorseError(f"{path} is a file; give the run directory it lies in")
    if str(model) not in preset_names():
        remedy = nearest(str(model), preset_names())
        raise WorkhorseError(f"there is no run directory or preset {str(model)!r}; {remedy}")
    tell(f"{model} is a preset: its weights are random and its tokens are bytes")
    return _random(str(model), where, precision, kernel)


def _run(path: Path, device: torch.device, dtype: torch.dtype, kernel: KernelName) -> Model:
    run = RunDirectory(path)
    if not run.exists and (path / "config.json").exists():
        raise WorkhorseError(
            f"{path} looks like a Hugging Face directory, which this version does not read yet; "
            "give a run directory or a preset"
        )
    tokenizer = run.tokenizer()
    decoder = run.load_decoder(device=device, dtype=dtype, kernel=kernel)
    data = DataConfig.from_dict(run.recipe()["data"])
    return Model(str(path), decoder, tokenizer, trained=True, data=data)


def _random(name: str, device: torch.device, dtype: torch.dtype, kernel: KernelName) -> Model:
    config = preset(name)
    with torch.random.fork_rng():  # the same "random" weights every time, and nobody else's draws
        torch.manual_seed(0)
        decoder = config.build(kernel=kernel, device=device, dtype=dtype)
    tokenizer = train_tokenizer(BytesConfig(), [])
    return Model(name, decoder.eval(), tokenizer, trained=False)


def _config(config: GenerationConfig | None, options: dict[str, Any]) -> GenerationConfig:
    if config is None:
        return GenerationConfig(**options)
    return config.replace(**options) if options else config


def _dtype(name: str) -> torch.dtype:
    dtypes = {
        "auto": torch.float32,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    if name not in dtypes:
        raise WorkhorseError(f"dtype {name!r} is unknown; {nearest(name, dtypes)}")
    return dtypes[name]
