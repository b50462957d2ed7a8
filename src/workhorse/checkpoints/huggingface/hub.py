"""Models by their Hugging Face hub id: the local folder of a downloaded or cached model.

The `huggingface_hub` library does the work and honours its environment variables: `HF_HOME` (where
the cache is), `HF_TOKEN`, `HF_HUB_OFFLINE`, `HF_ENDPOINT`.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from workhorse.errors import WorkhorseError

WEIGHTS = "*.safetensors"
ALLOWED = (
    WEIGHTS,
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "vocab.txt",
    "merges.txt",
)
"""Files that hold only data. Anything else in the repository (code, pickles) is not downloaded."""
IGNORED = ("*/*", "consolidated*.safetensors")
"""Subfolders, and the second copy of the weights that Mistral's repositories have."""

_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^@\s]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    weights: bool = True,
    tell: Callable[[str], object] = lambda line: None,
) -> Path:
    """The local folder of a model on the hub, downloaded if need be.

    Args:
        name: `org/name` or `org/name@revision`.
        revision: a branch, a tag or a commit; `main` if neither names one. Only a commit always
            gives the same files.
        weights: whether they are wanted; everything else is small.
        tell: called with the commit that a revision stands for now.

    Raises:
        WorkhorseError: there is no such model or revision, it is not open to the user, or it is
            not in the cache and the hub cannot be reached.
    """
    parts = _ID.fullmatch(name)
    if parts is None:
        raise WorkhorseError(f"{name!r} is not a hub id; write org/name or org/name@revision")
    if revision and parts["revision"] not in {None, revision}:
        raise WorkhorseError(f"{name!r} and revision={revision!r} disagree; give one of them")
    wanted = str(revision or parts["revision"] or "main")
    folder = _snapshot(parts["name"], wanted, ALLOWED if weights else ALLOWED[1:])
    if not _COMMIT.fullmatch(wanted):
        commit = folder.name
        tell(f"{parts['name']} at {wanted} is commit {commit}; pin it by @{commit}")
    return folder


def _snapshot(name: str, revision: str, allowed: Sequence[str]) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    # The base of its errors is the base of all errors of the HTTP library below, which has changed.
    transport: tuple[type[Exception], ...] = errors.HfHubHTTPError.__bases__
    hub = constants.ENDPOINT
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=list(allowed), ignore_patterns=list(IGNORED)
        )
    except errors.HFValidationError as error:
        reason = str(error).splitlines()[0]
        raise WorkhorseError(f"{name!r} is not a hub id: {reason}") from None
    except errors.GatedRepoError:
        raise WorkhorseError(
            f"{name} is gated; accept its terms at {hub}/{name} and set HF_TOKEN to your token"
        ) from None
    except errors.RepositoryNotFoundError:
        raise WorkhorseError(
            f"there is no model {name} on {hub}, or it is private; check the name, or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise WorkhorseError(
            f"{name} has no revision {revision!r}; name one of its branches, tags or commits"
        ) from None
    except errors.LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            raise WorkhorseError(
                f"{name} at {revision} is not whole in the cache {constants.HF_HUB_CACHE} and "
                "HF_HUB_OFFLINE is set; unset it, or give a local folder"
            ) from None
        raise WorkhorseError(
            f"{name} at {revision} is not whole in the cache and {hub} does not answer; "
            "check the network, or give a local folder"
        ) from None
    except transport as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise WorkhorseError(f"cannot fetch {name} from {hub}: {reason}") from None
    return Path(folder)
