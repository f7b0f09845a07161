"""Failures of the Hub as errors that name what was found, what was expected and what to do."""

import difflib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, errors, get_token

from offplan.checkpoint.answers import CLIENT
from offplan.checkpoint.jsontext import describe, quote
from offplan.checkpoint.tensors import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from offplan.errors import CheckpointError, HubError, OffplanError, Topic
from offplan.files import load_facts

_PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BUSY = (408, 429)
"""Statuses below 500 that say nothing about what was asked for."""
_LOGIN = "write its name and password into the proxy's address, http://NAME:PASSWORD@HOST:PORT"
_BY_STATUS = {
    407: f"the proxy wants a login; {_LOGIN}",
    408: "the server timed out; try again later",
    416: "the file is empty or shorter than its header says; tell the model's owner",
}
_LISTS = [Path(__file__).with_name("popular.yaml"), Path(__file__).parent / "gguf" / "ollama.yaml"]
"""Facts that name models on the Hub: as keys, and as values by the names and sizes of Ollama's."""
_MOST_LIKE = 2
_MOST_SHOWN = 4
_OTHER_LAYOUTS = (
    (
        r"model_index\.json",
        "a pipeline of diffusers",
        "name a language model: offplan runs the models of transformers that write text",
    ),
    (
        r"(.*/)?(consolidated.*|params\.json|.*\.pth)",
        "its maker's own layout",
        "name the same model in the layout of transformers, whose name often ends in -hf",
    ),
    (
        r".*\.(bin|pt|ckpt)",
        "weights in pickled files",
        "name a repository that has them in safetensors, or convert them: load the model with "
        "transformers and call save_pretrained",
    ),
    (
        r".*\.safetensors",
        f"safetensors that no {INDEX_NAME} lists",
        "name the repository of the whole model",
    ),
    (
        r".*\.(onnx|npz|mlmodel|mlpackage|tflite|task|h5|msgpack|engine)",
        "another program's format",
        "name the same model in safetensors",
    ),
)
"""Files of a repository by which it has something else than a checkpoint, the surest first."""
_COMMIT_DIGITS = 12


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
    if isinstance(error, errors.GatedRepoError):
        reason = _explain_gate(repo)
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = (
            "found nothing of this name on disk and no such model on the Hub, or it is private; "
            f"check the name{find_like(repo)}, and for a private model {_name_token()}"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        reason = "found no such revision; check `revision` (a branch, a tag or a commit)"
    elif isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 404:
        kind = NoSuchFile
        reason = (
            f"found no {filename}; the repository is incomplete, or it is not in the safetensors "
            "layout of transformers"
        )
    elif isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        kind = HubError if status >= 500 or status in _BUSY else CheckpointError
        reason = f"{filename}: {_explain_status(status, error.response.headers)}"
    elif isinstance(error, OSError) and (error.filename or error.errno in _FULL):
        reason = (
            f"{filename} cannot be kept in {constants.HF_HUB_CACHE} ({error.strerror}); make room "
            "there and let it be written to, or set HF_HOME to another folder"
        )
    elif not isinstance(error, (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)):
        kind = HubError if _has_protocol() else CheckpointError
        reason = f"{filename}: {_explain_silence(error)}"
        reason += "" if "/" in repo else f"; check the name, too{find_like(repo)}"
    elif constants.HF_HUB_OFFLINE:
        kind = NoSuchFile
        reason = (
            f"{filename} is not in the cache {constants.HF_HUB_CACHE} and HF_HUB_OFFLINE is set; "
            f"unset it to fetch the file, check the name{find_like(repo)}, or name a folder"
        )
    elif isinstance(error.__cause__, (type(None), errors.LocalEntryNotFoundError)):
        kind = HubError
        reason = f"{filename}: cannot reach {constants.ENDPOINT}; {_advise_network()}"
    else:
        # huggingface_hub says "not found locally" for whatever kept it from asking the server.
        return explain(error.__cause__, repo, revision, filename)
    return kind(f"{_name_source(repo, revision)}: {reason}", topic=Topic.DOWNLOADS)


def find_like(repo: str) -> str:
    """Name models on the Hub that have nearly this name, in a clause; empty where none is known."""
    by_name = {_simplify(known): known for known in _list_known()}
    by_model = {name.rpartition("/")[2]: known for name, known in by_name.items()}
    wanted = _simplify(repo)
    *owner, model = wanted.split("/")
    exact = by_name.get(wanted) or by_model.get(model)
    found = [exact] if exact else []
    if not found:
        near = difflib.get_close_matches(model, by_model, _MOST_LIKE, cutoff=0.8)
        found = [by_model[each] for each in near]
    found = [each for each in found if each != repo]
    if found:
        return f" (is {' or '.join(found)} meant?)"
    return "" if owner else " (most have their owner's name before them: Qwen/Qwen3-8B)"


@contextmanager
def blaming_cache(repo: str) -> Iterator[None]:
    """Add to errors on damaged files of the Hub's cache what to remove, so that they come again."""
    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    try:
        yield
    except CheckpointError as error:
        if not str(error).startswith(f"{folder}{os.sep}"):
            raise
        help_ = f"remove {folder} and try again: offplan then downloads it anew"
        raise CheckpointError(f"{error}; {help_}", topic=Topic.DOWNLOADS) from error


def explain_contents(repo: str, names: Sequence[str]) -> NoSuchFile:
    """Explain that a repository of these files has no checkpoint that can be read."""
    shown = [name for name in names if not name.startswith(".")][:_MOST_SHOWN]
    found, help_ = "no weights", "check the model's page for the repository that has them"
    if shown:
        found += f" among its files ({', '.join(map(quote, shown))})"
    for pattern, kind, remedy in _OTHER_LAYOUTS:
        if name := next(filter(re.compile(pattern).fullmatch, names), None):
            found, help_ = f"{quote(name)}, {kind}", remedy
            break
    return NoSuchFile(
        f"{repo}: found {found}, expected {CONFIG_NAME} and {SINGLE_NAME} or {INDEX_NAME}; {help_}",
        topic=Topic.DOWNLOADS,
    )


def _simplify(name: str) -> str:
    return re.sub(r"[^a-z0-9/]", "", name.lower())


def _list_known() -> list[str]:
    popular, of_ollama = map(load_facts, _LISTS)
    return [*popular, *(known for sizes in of_ollama.values() for known in sizes.values())]


def _name_source(repo: str, revision: str | None) -> str:
    is_commit = revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision)
    short = revision[:_COMMIT_DIGITS] if revision and is_commit else revision
    return f"{repo}@{short}" if short else repo


def _explain_gate(repo: str) -> str:
    page = f"{constants.ENDPOINT}/{repo}"
    if get_token() is None:
        return (
            f"the model is gated, and no token is set; accept its terms at {page}, then set "
            "HF_TOKEN or run `hf auth login`"
        )
    return (
        f"the model is gated, and the token that is set has no access; accept its terms at {page} "
        "with the token's account, wait where its owner has to agree, and let a fine-grained token "
        "read gated models"
    )


def _name_token() -> str:
    if get_token() is None:
        return "set HF_TOKEN or run `hf auth login`"
    return "use a token whose account may see it: the one that is set does not"


def _explain_status(status: int, headers: object) -> str:
    is_set, is_home = get_token() is not None, _is_home()
    if status >= 500:
        where = (
            "https://status.huggingface.co tells of failures" if is_home else "check HF_ENDPOINT"
        )
        return (
            f"the server {constants.ENDPOINT} failed (HTTP {status}), also when asked again; try "
            f"again later, what has come is kept; {where}"
        )
    if status == 429:
        limit = "" if is_set else ", or set HF_TOKEN for a higher limit"
        return (
            f"HTTP 429: too many requests from this address, also when asked again; wait "
            f"{_read_wait(headers)}{limit}"
        )
    if status in (401, 403):
        told = "the token that is set is not valid or has no access"
        told = told if is_set else "access without a token is refused"
        help_ = "set another HF_TOKEN or run `hf auth login`" if is_set else _name_token()
        return f"HTTP {status}: {told}; {help_}"
    return f"HTTP {status}: {_BY_STATUS.get(status, 'the server refused; check HF_ENDPOINT')}"


def _read_wait(headers: object) -> str:
    seconds = getattr(headers, "get", lambda _: None)("Retry-After") or ""
    if seconds.isascii() and seconds.isdecimal() and len(seconds) < 6:
        return f"{int(seconds)} seconds"
    return "five minutes"


def _explain_silence(error: BaseException) -> str:
    """Explain why no answer that a Hub gives has come."""
    text = describe(error)
    if not _has_protocol():
        return (
            f"found {quote(constants.ENDPOINT)} as HF_ENDPOINT, expected an address such as "
            "https://huggingface.co; correct it, or unset it"
        )
    if isinstance(error, CLIENT.ProxyError):
        help_ = _LOGIN if "407" in text else "correct it, or unset it where none is needed"
        return f"no way through the proxy of {_name_proxy()} ({text}); {help_}"
    if isinstance(error, errors.FileMetadataError):
        return (
            f"the answer from {constants.ENDPOINT} is none of a Hub's: it may be the login page of "
            "a network or of a proxy; open the address in a browser, and check HF_ENDPOINT"
        )
    if "SSL" in text:
        return (
            f"no trusted connection to {constants.ENDPOINT} ({text}); check HF_ENDPOINT and the "
            "clock, and where a proxy opens connections set SSL_CERT_FILE to its certificate"
        )
    if isinstance(error, (CLIENT.ConnectError, CLIENT.ConnectTimeout)):
        return f"cannot reach {constants.ENDPOINT} ({text}); {_advise_network()}"
    return (
        f"no valid answer from {constants.ENDPOINT} ({text}), also when asked again; try again, "
        f"what has come is kept; {_advise_network()}"
    )


def _advise_network() -> str:
    checks = ["the network", *(f"the proxy of {name}" for name in _name_proxies()[:1])]
    checks += [] if _is_home() else ["HF_ENDPOINT"]
    *first, last = checks
    listed = f"{', '.join(first)} and {last}" if first else last
    return f"check {listed}, or name a folder with the model"


def _name_proxies() -> list[str]:
    """Name the variables that name a proxy: their values may hold a password."""
    return [name for name in _PROXIES if os.environ.get(name) or os.environ.get(name.lower())]


def _name_proxy() -> str:
    return " or ".join(_name_proxies()) or "the system"


def _has_protocol() -> bool:
    return bool(constants.ENDPOINT.startswith(("http://", "https://")))


def _is_home() -> bool:
    return bool(constants.ENDPOINT.rstrip("/") == constants.HUGGINGFACE_CO_URL_HOME.rstrip("/"))
