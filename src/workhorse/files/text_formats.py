"""Reads text files, JSON and YAML within limits, so that no file can crash the process."""

import errno
import gc
import io
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import yaml

from workhorse.errors import WorkhorseError, shown

REMEDIES = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.ENAMETOOLONG: "check the path",
    errno.EACCES: "give yourself read permission",
    errno.EPERM: "give yourself read permission",
}
"""Remedies in the message of a failed attempt to open a file, by errno."""
_GIT_BLOB = r"[0-9a-f]{40}|[0-9a-f]{64}"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_SHARED_BLOB = r"([0-9a-f]{2})/\1[0-9a-f]{62}"


def to_path(given: object, rule: str) -> Path:
    """Convert an argument that names a file or folder to a Path.

    Args:
        given: a string or a Path.
        rule: the beginning of the error message, such as "a folder is a path".

    Raises:
        WorkhorseError: the argument is not a string or Path, or is not a valid file name.
    """
    if not isinstance(given, str | Path):
        raise WorkhorseError(f"{rule}, not {shown(given)}; give it as a string or a Path")
    name = str(given)
    if "\0" in name or any("\ud800" <= letter < "\udc80" for letter in name):
        raise WorkhorseError(f"{rule}, and {shown(name)} is not a valid one; choose another name")
    return Path(given)


def unreadable(path: Path, error: OSError) -> WorkhorseError:
    """Return the error for a file that the system refused to read, with a remedy."""
    remedy = REMEDIES.get(error.errno or 0, "check the disk")
    return WorkhorseError(f"cannot read {path}: {error.strerror or error}; {remedy}")


def open_contained(folder: Path, name: str, *, root: Path | None = None) -> BinaryIO:
    """Open a file directly in a folder, unbuffered, for reading bytes.

    A link must not lead out of `root`; None: out of `folder`.

    Raises:
        WorkhorseError: the name is a path, a link leads out of the folder, the file is missing,
            not readable or not a regular file, or it is a Git LFS pointer.
    """
    if name in {"", ".", ".."} or "/" in name or "\\" in name or not name.isprintable():
        raise WorkhorseError(f"{folder}: {shown(name)} is not the name of a file in the folder")
    path = folder / name
    try:
        real = Path(os.path.realpath(path, strict=True))
        if not _belongs(real, Path(os.path.realpath(root or folder))):
            raise WorkhorseError(
                f"{path} is a link out of its folder; replace it by the file if you trust it"
            )
        if not stat.S_ISREG(real.stat().st_mode):
            kind = "a folder" if real.is_dir() else "a special file"
            raise WorkhorseError(f"{path} is {kind}, not a regular file; download the model again")
        # O_NONBLOCK: if the file was replaced by a pipe after the check, do not wait for a writer.
        file = os.fdopen(os.open(real, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
        if os.pread(file.fileno(), len(_LFS_POINTER), 0) == _LFS_POINTER:
            file.close()
            raise WorkhorseError(
                f"{path} is a Git LFS pointer, not the file itself; run git lfs pull in its folder"
            )
        return file
    except FileNotFoundError:
        raise WorkhorseError(f"{path} is missing; download the model again") from None
    except OSError as error:
        raise unreadable(path, error) from None


def read_bytes(path: Path, *, limit: int, root: Path | None = None) -> bytes:
    """Read a regular file of up to `limit` bytes.

    A link must not lead out of `root`; None: out of the file's folder.

    Raises:
        WorkhorseError: the file is missing, unreadable, too large, a link out of the folder, or not
            a regular file.
    """
    with open_contained(path.parent, path.name, root=root) as file:
        try:
            raw = file.read(limit + 1) or b""
        except OSError as error:
            raise unreadable(path, error) from None
    if len(raw) > limit:
        raise WorkhorseError(f"{path} is larger than {limit} bytes, the limit for such a file")
    return raw


def open_plain(path: Path) -> io.BufferedReader:
    """Open a file given by the user for reading bytes. A link may lead to any folder.

    Raises:
        WorkhorseError: the file cannot be read, or is a folder, pipe or device.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a pipe's writer
    except OSError as error:
        raise unreadable(path, error) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or device"
        raise WorkhorseError(f"cannot read {path}: it is {kind}; give a regular file")
    return io.BufferedReader(io.FileIO(descriptor))


def read_text(path: Path, *, limit: int) -> str:
    """Read a UTF-8 file given by the user, of up to `limit` bytes.

    Raises:
        WorkhorseError: the file cannot be read, is not a regular file, is larger than `limit`, or
            is not UTF-8.
    """
    with open_plain(path) as file:
        try:
            raw = file.read(limit + 1)
        except OSError as error:
            raise unreadable(path, error) from None
    if len(raw) > limit:
        raise WorkhorseError(f"{path} is larger than {limit} bytes; give a smaller file")
    return decoded(raw, str(path))


def decoded(raw: bytes, what: str) -> str:
    """Decode UTF-8. `what` names the bytes in error messages.

    Raises:
        WorkhorseError: a byte is not UTF-8; the message has its offset.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise WorkhorseError(f"{what} is not UTF-8: bad byte at offset {error.start}") from None


def _belongs(real: Path, folder: Path) -> bool:
    """Return True if a file is in a folder, or in the Hugging Face cache that contains the folder.

    In this cache, files in `CACHE/models--ORG--NAME/snapshots/COMMIT/` are links to
    `../../blobs/HASH`, which may be links to `CACHE/blobs/HA/HASH`, shared by all repositories.
    """
    if real.is_relative_to(folder):
        return True
    snapshots, repository = folder.parent, folder.parent.parent
    if snapshots.name != "snapshots" or not repository.name.startswith("models--"):
        return False
    return any(
        real.is_relative_to(blobs) and re.fullmatch(names, real.relative_to(blobs).as_posix())
        for blobs, names in (
            (repository / "blobs", _GIT_BLOB),
            (repository.parent / "blobs", _SHARED_BLOB),
        )
    )


MAX_DEPTH = 64
MAX_VALUES = 850_000
"""Maximum number of values in a JSON file. Each takes Python about 1 µs and up to 70 bytes. The
header of a safetensors file with 100,000 tensors has 800,000 values. No published file has more."""


def read_json(path: Path, *, limit: int = 4_000_000) -> dict[str, Any]:
    """Read a JSON file that contains an object, of up to `limit` bytes.

    Raises:
        WorkhorseError: the file cannot be read, is too large, or is not valid for `parse_json`.
    """
    return parse_json(read_bytes(path, limit=limit), str(path))


def parse_json(raw: bytes, what: str, *, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        raw: the JSON as UTF-8.
        what: the name of the JSON in error messages.
        max_values: the maximum number of elements of all objects and lists together.

    Raises:
        WorkhorseError: the JSON is invalid or not an object, has too many values, is nested deeper
            than `MAX_DEPTH`, has a key twice, or has a number that a float cannot represent.
    """
    # An upper bound of the number of values, without parsing.
    if sum(map(raw.count, (b",", b"[", b"{"))) > max_values:
        raise WorkhorseError(f"{what} has more than {max_values} values, too many for such a file")
    text = decoded(raw, what)
    try:
        with collector_paused():
            data = json.loads(
                text,
                object_pairs_hook=_without_repeats,
                parse_float=_finite,
                parse_constant=_refuse_constant,
            )
    except RecursionError:
        raise WorkhorseError(f"{what} is nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        raise WorkhorseError(f"{what} is not valid JSON: {json_fault(error)}") from None
    if not isinstance(data, dict):
        raise WorkhorseError(f"{what} is {shown(data)}, not a JSON object")
    if _depth(data) > MAX_DEPTH:
        raise WorkhorseError(f"{what} is nested deeper than {MAX_DEPTH}")
    return data


def json_fault(error: ValueError) -> str:
    """Return the reason and the position of a JSON error; the first line is not named."""
    reason = str(error).partition(";")[0]  # Python's advice is for programmers, not for users
    return reason.partition(" (char")[0].replace(": line 1 column", " at column")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector while a large file is parsed.

    The collector would take twice as long as the parsing, and plain data has no reference cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shown(twice)} occurs twice")
    return made


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shown(text)} is too large for a float")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _depth(data: dict[str, Any]) -> int:
    """Return the nesting depth of objects and lists, counted up to `MAX_DEPTH` + 1."""
    level: list[Any] = [data]
    depth = 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            value
            for group in level
            for value in (group.values() if isinstance(group, dict) else group)
            if isinstance(value, (dict, list))
        ]
    return depth


MAX_CHARACTERS = 300_000
MAX_YAML_VALUES = 100_000
"""Maximum number of values in a YAML string after expansion of its aliases."""


class BadYaml(WorkhorseError):
    """Error: invalid or unsupported YAML. The message has the line and column if known."""


class _Yaml12Loader(yaml.SafeLoader):
    """A loader for YAML 1.2. PyYAML's own loaders read YAML 1.1: `3e-4` is a string, `on` is true.

    A key that is given twice is an error, while PyYAML would keep the last value. Merge keys of
    YAML 1.1 (`<<: *name`) are supported.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        # Composing is recursive: limit the depth before Python's stack overflows.
        self._depth += 1
        if self._depth > MAX_DEPTH:
            mark = cast(Any, self).peek_event().start_mark
            raise _problem(f"it is nested deeper than {MAX_DEPTH}; make it flatter", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            construct = cast(Callable[..., Any], self.construct_object)
            key = construct(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise _problem("a key must be a string or a number", key_node.start_mark)
            if key in seen:
                raise _problem(f"key {shown(key)} is given twice; keep one", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_TAGS = "tag:yaml.org,2002:"
_MERGE = f"{_TAGS}merge"
_SCALARS = {f"{_TAGS}{kind}" for kind in ("null", "bool", "int", "float", "str", "merge")}
_NUMBERS = {f"{_TAGS}int", f"{_TAGS}float"}

_YAML_1_2 = {
    "bool": (r"(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789"),
    "float": (
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
        r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$",
        "-+0123456789.",
    ),
}
"""Pattern and possible first characters of the plain (unquoted) scalars of each type. All other
scalars, such as dates and base-60 numbers, are strings."""

_Yaml12Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag.rpartition(":")[2] in ("null", "merge")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, (_rule, _first) in _YAML_1_2.items():
    _Yaml12Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
        f"{_TAGS}{_kind}", re.compile(_rule), list(_first)
    )


class _Yaml12Dumper(yaml.SafeDumper):
    """A dumper for YAML 1.2: quotes strings such as `1e3`, which PyYAML would write unquoted."""


for _kind, (_rule, _first) in _YAML_1_2.items():
    _Yaml12Dumper.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
        f"{_TAGS}{_kind}", re.compile(_rule), list(_first)
    )


def write_yaml(value: Any, *, on_a_line: bool = False) -> str:
    """Format plain data as YAML that `parse_yaml` reads back unchanged. Keys keep their order.

    `on_a_line=True` returns a single line, without a line break at its end.
    """
    flow, width = (True, 2**20) if on_a_line else (False, 80)
    text = yaml.dump(  # pyright: ignore[reportUnknownMemberType]
        value, Dumper=_Yaml12Dumper, sort_keys=False, default_flow_style=flow, width=width
    )
    return text.removesuffix("\n").removesuffix("\n...") if on_a_line else text


def parse_yaml(text: str) -> Any:
    """Parse YAML into plain data: mappings, lists, strings, numbers, true, false and null.

    Raises:
        BadYaml: the string is not YAML, contains another type (a date, a set, binary), or exceeds
            the limits on length, depth, or number of values with aliases expanded.
    """
    if len(text) > MAX_CHARACTERS:
        raise BadYaml(f"{len(text)} characters of YAML are more than {MAX_CHARACTERS}; shorten it")
    try:
        loader = _Yaml12Loader(text)
        node = loader.get_single_node()  # pyright: ignore[reportUnknownMemberType]
        if node is None:
            return None
        _weigh(node, {})
        return loader.construct_document(node)  # pyright: ignore[reportUnknownMemberType]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = str(getattr(error, "problem", error)).splitlines()[0]
        raise BadYaml(f"not valid YAML{where}: {problem}") from None


def _weigh(node: yaml.Node, weights: dict[int, int]) -> int:
    """Count the values in a YAML node with its aliases expanded, and check them.

    `weights` has the counts of visited nodes by `id`; 0 while a node is being counted.
    """
    key = id(node)
    if key in weights:
        if not weights[key]:
            raise _problem("an alias refers to itself; write out its value", node.start_mark)
        return weights[key]
    weights[key] = 0  # marks the node as in progress, to detect a cycle
    weight = 1
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node)
    elif node.tag != f"{_TAGS}{'map' if isinstance(node, yaml.MappingNode) else 'seq'}":
        raise _not_plain(node)
    for child in _children(node):
        weight += _weigh(child, weights)
        if weight > MAX_YAML_VALUES:
            problem = f"there are more than {MAX_YAML_VALUES} values with all aliases expanded"
            raise _problem(f"{problem}; shorten it", node.start_mark)
    weights[key] = weight
    return weight


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        pairs = cast(list[tuple[yaml.Node, yaml.Node]], node.value)
        return [part for pair in pairs for part in pair]
    return cast(list[yaml.Node], node.value) if isinstance(node, yaml.SequenceNode) else []


def _check_scalar(node: yaml.ScalarNode) -> None:
    text = cast(str, node.value)
    if node.tag not in _SCALARS:
        raise _not_plain(node)
    kind = node.tag.removeprefix(_TAGS)
    rule = _YAML_1_2.get(kind)
    if rule is not None and not re.match(rule[0], text):
        raise _problem(f"{shown(text)} is not a valid {kind}; remove the tag", node.start_mark)
    if node.tag in _NUMBERS and len(text) > sys.int_info.default_max_str_digits:
        raise _problem(f"a number of {len(text)} digits is too large", node.start_mark)
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise _problem(f"{shown(text)} has an unpaired surrogate", node.start_mark)


def _not_plain(node: yaml.Node) -> yaml.MarkedYAMLError:
    kind = node.tag.replace(_TAGS, "!!")
    return _problem(f"{shown(kind)} is not supported; write strings or numbers", node.start_mark)


def _problem(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
