"""Compiled decoding: a whole step is one program, which is stored on disk.

At a batch of one, the Python around each layer costs as much as its arithmetic. The step is traced
once into a single program of fused loops and gemms. Its shapes do not depend on how many tokens the
cache holds. The program is stored on disk without the weights, so a model is compiled once per
machine, and later processes load the program.

The folder of programs (mode 0700) and its files (0600) belong to the user, and no other user can
access them. A file with another owner or mode is never read.
"""

import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import workhorse.execute
import workhorse.native
import workhorse.nn
import workhorse.transforms
from workhorse.devices.instructions import used
from workhorse.devices.names import cache_folder, name_of
from workhorse.execute.backend import Snapshot
from workhorse.execute.compiled.fixed_step import Variant, check_fixed, fixed_step
from workhorse.native.build import sources_digest
from workhorse.nn import Decoder
from workhorse.nn.cache.fixed import CacheTensors
from workhorse.transforms.record import transforms_of

if TYPE_CHECKING:
    from workhorse.execute.compiled.step_compiler import Program

_OTHERS = 0o077
"""Permission bits of everybody except the owner."""


class ProgramFolder:
    """A folder of compiled programs, each stored under a name.

    Args:
        path: the folder; it is created when the first program is stored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, name: str) -> BufferedReader | None:
        """Open a program's file; None if it does not exist or is not private, which is logged."""
        try:
            self._secure(make=False)
            file = open(self.path / name, "rb", opener=_without_following)  # noqa: SIM115
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("a compiled step cannot be read: %s", error)
            return None
        if reason := _why_not_private(os.fstat(file.fileno())):
            log.warning("%s is ignored and compiled again: %s", self.path / name, reason)
            file.close()
            return None
        return file

    def keep(self, name: str, write: Callable[[Path], object]) -> None:
        """Store a program atomically; a failure is logged.

        Args:
            name: the name of the program.
            write: writes the program to an existing empty file.
        """
        temporary = self.path / f".tmp-{os.getpid()}-{name}"
        try:
            self._secure(make=True)
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
            write(temporary)
            temporary.replace(self.path / name)
        except OSError as error:
            log.warning("the compiled step cannot be saved: %s", error)
        finally:
            with suppress(OSError):  # still there if writing failed
                temporary.unlink()

    def _secure(self, *, make: bool) -> None:
        """Remove other users' access to the folder.

        Args:
            make: True to create the folder if it does not exist.

        Raises:
            OSError: the folder does not exist, or belongs to another user.
        """
        if make:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(
                f"{self.path} is not a folder of this user; remove it, or set XDG_CACHE_HOME"
            )
        if found.st_mode & _OTHERS:  # from an older version, or made by hand
            self.path.chmod(0o700)


def _without_following(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _why_not_private(found: os.stat_result) -> str | None:
    if not stat.S_ISREG(found.st_mode):
        return "it is not a file"
    if found.st_uid != os.geteuid():
        return "it belongs to another user"
    if found.st_mode & _OTHERS:
        return f"other users can access it (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


log = logging.getLogger(__name__)


KNOWN = ("torch.", "workhorse.")
"""Packages whose code is part of `_fingerprint`. Programs with classes of other packages are not
stored, because changes of their code would not be noticed."""


class CompiledStep:
    """A `FixedStep` that runs as a compiled program.

    The first step of each `Variant` compiles its program, or reads it from disk. If weights or
    modules are replaced later, or another adapter is set, steps are compiled again.

    Args:
        decoder: the decoder in evaluation mode.
        folder: the folder for the programs; None for the user's cache folder.

    Raises:
        WorkhorseError: the model has a mixture of experts, or RoPE angles that depend on the
            sequence length. Also raised at the first step, if it cannot be compiled.
    """

    def __init__(self, decoder: Decoder, folder: Path | None = None) -> None:
        check_fixed(decoder, "compiled")
        self.decoder = decoder
        self.folder = ProgramFolder(folder or cache_folder() / "programs")
        self.programs: dict[Variant, Program] = {}
        self.snapshot: Snapshot | None = None

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling, without programs, which refer to the weights of this process."""
        return vars(self) | {"programs": {}, "snapshot": None}

    def __call__(self, variant: Variant, tokens: Tensor, tensors: CacheTensors) -> Tensor:
        tokens = tokens.clone(memory_format=torch.contiguous_format)  # strides are checked
        if self.snapshot is None or not self.snapshot.unchanged:
            self.snapshot, self.programs = Snapshot(self.decoder), {}
        if program := self.programs.get(variant):
            return program(tokens, tensors)
        self.programs[variant], logits = self._first_step(variant, tokens, tensors)
        return logits

    def _first_step(
        self, variant: Variant, tokens: Tensor, tensors: CacheTensors
    ) -> tuple["Program", Tensor]:
        """Run the first step of a variant: load its program from disk, or compile and save it.

        Returns:
            The program, and the logits of the step.
        """
        from workhorse.execute.compiled.step_compiler import Program

        name, known = self._fingerprint(variant), {"decoder": self.decoder}
        if file := self.folder.open(name):
            with file:
                try:
                    program = Program.read(file, known)
                    return program, program(tokens, tensors)  # checks that it fits this decoder
                except Exception as error:  # it can always be compiled again
                    path = self.folder.path / name
                    log.warning("%s cannot be loaded and is compiled again: %s", path, error)
        program = compile_step(self.decoder, variant, tokens, tensors)
        if all(map(_is_known, self.decoder.modules())):
            self.folder.keep(name, lambda path: program.write(path, known))
        return program, program(tokens, tensors)

    def _fingerprint(self, variant: Variant) -> str:
        """Name of a program's file: a digest of everything that the program depends on."""
        decoder = self.decoder
        state = (*decoder.named_parameters(), *decoder.named_buffers())
        scalars = (int, float, str, bool)
        facts = (
            decoder.config.to_dict(),
            repr(decoder),
            [
                (name, key, value)
                for name, module in decoder.named_modules()
                for key, value in vars(module).items()
                if isinstance(value, scalars)
            ],
            [(name, str(t.dtype), str(t.device), tuple(t.shape)) for name, t in state],
            (variant, torch.get_num_threads(), torch.__version__),
            (torch.backends.cpu.get_cpu_capability(), name_of(state[0][1].device)),
            (used(), sources_digest(), repr(transforms_of(decoder))),
            [source.read_text() for source in _sources()],
        )
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _is_known(module: nn.Module) -> bool:
    kinds = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return all(kind.__module__.startswith(KNOWN) for kind in kinds)


def compile_step(
    decoder: Decoder, variant: Variant, tokens: Tensor, tensors: CacheTensors
) -> "Program":
    """Compile a decoding step of a variant.

    The program runs for caches of any length. The variant determines whether the batch size and the
    number of tokens per sequence are 1, or any number above 1.

    Args:
        decoder: the decoder.
        variant: the variant of the step.
        tokens: (batch, seq), an example.
        tensors: example tensors of the cache.
    """

    def step(tokens: Tensor, tensors: CacheTensors) -> Tensor:
        return fixed_step(decoder, variant, tokens, tensors)

    batch = [0] if variant.batched else []
    varying = (
        (tokens, [*batch, 1] if variant.guessed else batch),
        (tensors.lengths, batch),
        *((table, [*batch, 1]) for table in tensors.tables),
        *((stored, [1]) for stored in (*tensors.keys, *tensors.values)),
    )
    from workhorse.execute.compiled.step_compiler import compile_program

    return compile_program(step, (tokens, tensors), varying)


def _sources() -> Iterator[Path]:
    """Yield the Python files that a program depends on. `sources_digest` covers the C++ files."""
    for package in (workhorse.execute, workhorse.native, workhorse.nn, workhorse.transforms):
        yield from sorted(Path(str(package.__file__)).parent.rglob("*.py"))
