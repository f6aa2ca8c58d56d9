"""Models of the Hugging Face Hub by name: downloads into the Hub's own cache, and uploads.

The package huggingface_hub reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE, as for every
other program. Processes of one machine share its cache: the lock of each file lets one of them
download it.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from jtrain.errors import CheckpointError
from jtrain.io.redact import redact

_PART = r"[A-Za-z0-9_][\w.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([\w./+-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Names that end so are paths of files, which are missing where they do not exist.
_FILES = (".safetensors", ".gguf", ".json", ".jinja", ".txt", ".bin", ".pt", ".pth", ".ckpt")
# A pickle is never downloaded: reading one runs the program in it.
_SMALL = (
    *("*config.json", "*.safetensors.index.json", "tokenizer.json", "tokenizer.model"),
    *("special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
)
_OTHER_COPIES = ("*/*", "consolidated*")  # of the same weights
_commits: dict[str, str] = {}  # by the names that this process has resolved
_folders: dict[tuple[str, bool], Path] = {}  # by name and `weights`


def is_hub_name(name: str) -> bool:
    """Return whether a text is `org/name` or `org/name@revision`, and not a local path."""
    return bool(_NAME.fullmatch(name)) and not name.endswith(_FILES) and not Path(name).exists()


def local_folder(name: str, *, weights: bool = True) -> Path:
    """Return the local folder of a published model: a path as it is, a name after its download.

    A name stands for one commit in all of a process: that of `pin_commits`, or the first one found.

    Args:
        name: a path, or `org/name` or `org/name@revision` where there is no such path.
        weights: download the tensors, too, and not only config, tokenizer and index.

    Raises:
        CheckpointError: if the model is not on the Hub, may not be read, or cannot be reached.
    """
    if not is_hub_name(name):
        return Path(name)
    folder = _folders.get((name, True)) or _folders.get((name, weights))
    if folder is None or folder.name != _commits[name]:
        folder = _folders[name, weights] = _download(name, weights)
        _commits[name] = folder.name
    return folder


def split_name(name: str) -> tuple[str, str]:
    """Return the repository of a name, and its revision: `main` where it has none."""
    repo, _, revision = name.partition("@")
    return repo, revision or "main"


def resolved_commits() -> dict[str, str]:
    """Return the commit of each name that this process has resolved."""
    return dict(_commits)


def pin_commits(commits: Mapping[str, str]) -> None:
    """Let each name stand for a commit, wherever its branch is now."""
    _commits.update({name: x for name, x in commits.items() if _COMMIT.fullmatch(x)})


def push_folder(folder: Path, name: str, *, private: bool) -> str:
    """Upload a folder as one commit of a model, created if it is new; return its address.

    Args:
        private: visibility of a new model; False: the default of its owner, which is public unless
            an organization has set otherwise.

    Raises:
        CheckpointError: if the Hub refuses it, or cannot be reached.
    """
    api = _import(name).HfApi()
    try:
        url = api.create_repo(name, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload from jtrain")
    except Exception as error:  # of the network or the server
        raise CheckpointError(
            f"the upload to {name} failed ({_reason(error)}). Give a token that may write there "
            f"(set HF_TOKEN, or: hf auth login), and push again."
        ) from None
    return str(url)


def _download(name: str, weights: bool) -> Path:
    hub = _import(name)
    repo, revision = split_name(name)
    patterns = [*_SMALL, "*.safetensors"] if weights else list(_SMALL)
    with _hub_errors(name):
        found = hub.snapshot_download(
            repo,
            revision=_commits.get(name, revision),
            allow_patterns=patterns,
            ignore_patterns=list(_OTHER_COPIES),
        )
    return Path(found)


def _import(name: str) -> ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(
            f"{name} is not a local path, and the Hugging Face Hub is read by the package "
            f"huggingface_hub, which is not installed. Correct the path, or install it: "
            f"pip install 'jtrain[hub]'"
        ) from None
    return huggingface_hub


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    from huggingface_hub import constants, errors

    repo, revision = split_name(name)
    page = f"{constants.ENDPOINT}/{repo}"
    login = "a token that may read it (set HF_TOKEN, or: hf auth login)"
    try:
        yield
    except errors.GatedRepoError:
        words = f"is gated. Accept its terms at {page}, and give {login}"
    except errors.RevisionNotFoundError:
        words = f"has no revision {revision}. Name a branch, a tag or a commit of {page}/commits"
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        words = (
            f"is neither a local path nor a model on the Hub that you may see. Correct the name, "
            f"or, for a private model, give {login}"
        )
    except errors.LocalEntryNotFoundError as error:
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _reason(error.__cause__)
        words = (
            f"is neither a local path nor complete in the cache {constants.HF_HUB_CACHE}, and the "
            f"Hub is not asked ({offline}). Where there is a network: hf download {repo} "
            f"--revision {revision}; then copy its cache here, and name its folder by HF_HOME"
        )
    except Exception as error:  # of the network, the disk or the server
        words = (
            f"could not be downloaded: {_reason(error)}. The same command continues the download; "
            f"if it was refused, give {login}"
        )
    else:
        return
    raise CheckpointError(f"{name} {words}.")


def _reason(error: BaseException | None) -> str:
    first = str(error).strip().partition("\n")[0].rstrip(".")
    return redact(f"{type(error).__name__}: {first}" if first else type(error).__name__)
