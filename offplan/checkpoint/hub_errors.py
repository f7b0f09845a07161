"""Errors of the Hub, each in one line that says what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, errors

# The HTTP client's base error: httpx's in huggingface_hub 1, httpx2's in 2.
from huggingface_hub.errors import HTTPError as HTTPError  # type: ignore[attr-defined]

from offplan.checkpoint.jsontext import describe
from offplan.errors import CheckpointError, HubError, OffplanError, Topic

_BY_STATUS = {
    401: "the token is not valid or missing; set HF_TOKEN or run `hf auth login`",
    403: "the token has no access; ask for it on the model's page, or use another HF_TOKEN",
    408: "the server timed out; try again later",
    416: "the file is empty or shorter than its header says; tell the model's owner",
    429: "too many requests; wait a few minutes, or set HF_TOKEN for a higher limit",
}
_BUSY = (408, 429)
"""Statuses below 500 that say nothing about what was asked for."""


_FULL = (errno.ENOSPC, errno.EDQUOT)


class NoSuchFile(CheckpointError):
    """The repository, or offline the cache of it, has no file of this name."""


@contextmanager
def explaining(repo: str, revision: str | None, filename: str) -> Iterator[None]:
    """Turn whatever goes wrong while the Hub is asked for a file into what ``explain`` makes."""
    try:
        yield
    except OffplanError:
        raise
    except errors.HFValidationError as error:
        raise CheckpointError(f"{repo}: not a Hub id ({error}); correct the name") from error
    # A server may send what no client foresees: it fails with errors of any kind.
    except Exception as error:
        raise explain(error, repo, revision, filename) from error


def explain(error: BaseException, repo: str, revision: str | None, filename: str) -> OffplanError:
    """Turn what huggingface_hub or its HTTP client raised into an error for the user.

    A CheckpointError where what was asked for is not there or not allowed, a HubError where there
    was no answer to that.
    """
    kind: type[OffplanError] = CheckpointError
    where = f"{repo}@{revision}" if revision else repo
    if isinstance(error, errors.GatedRepoError):
        reason = (
            f"the model is gated; accept its terms at {constants.ENDPOINT}/{repo}, then set "
            "HF_TOKEN or run `hf auth login`"
        )
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = (
            "found nothing of this name on disk and no such model on the Hub, or it is private; "
            "check the name, and for a private model set HF_TOKEN or run `hf auth login`"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        reason = "found no such revision; check `revision` (a branch, a tag or a commit)"
    elif isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 404:
        kind = NoSuchFile
        reason = f"found no {filename}; the model is not in the safetensors layout of transformers"
    elif isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        kind = HubError if status >= 500 or status in _BUSY else CheckpointError
        if status >= 500:
            reason = f"{filename}: the server failed (HTTP {status}); try again later"
        else:
            known = _BY_STATUS.get(status, "the server refused; check HF_ENDPOINT")
            reason = f"{filename}: HTTP {status}: {known}"
    elif isinstance(error, OSError) and (error.filename or error.errno in _FULL):
        reason = (
            f"{filename} cannot be kept in {constants.HF_HUB_CACHE} ({error.strerror}); make room "
            "there and let it be written to, or set HF_HOME to another folder"
        )
    elif not isinstance(error, (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)):
        kind = HubError
        reason = (
            f"{filename}: no valid answer from {constants.ENDPOINT} ({describe(error)}); try again"
        )
    elif constants.HF_HUB_OFFLINE:
        kind = NoSuchFile
        reason = (
            f"{filename} is not in the cache and HF_HUB_OFFLINE is set; run once online, or name "
            "a folder"
        )
    elif isinstance(error.__cause__, (type(None), errors.LocalEntryNotFoundError)):
        kind = HubError
        reason = (
            f"{filename}: cannot reach {constants.ENDPOINT}; check the network and HF_ENDPOINT, "
            "or name a folder"
        )
    else:
        # huggingface_hub says "not found locally" for whatever kept it from asking the server.
        return explain(error.__cause__, repo, revision, filename)
    return kind(f"{where}: {reason}", topic=Topic.DOWNLOADS)
