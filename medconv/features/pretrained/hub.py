"""Weights from the Hugging Face Hub: `hf://OWNER/NAME/FILE` becomes a file of its cache."""

import re
from pathlib import Path
from typing import Any

from medconv.utils.errors import first_line
from medconv.utils.optional_imports import needed

PREFIX = "hf://"
# Formats that can be read without running code: pickles are read with `weights_only=True`.
_SUFFIXES = (".safetensors", ".pth", ".pt", ".ckpt", ".bin")
_SOURCE = re.compile(r"hf://(?P<repository>[^/@]+/[^/@]+)/(?P<file>[^@]+)(?:@(?P<revision>.+))?")


def is_remote(source: str | Path) -> bool:
    """Whether a source names a file of the Hub."""
    return str(source).startswith(PREFIX)


def local_file(source: str | Path) -> Path:
    """The file that a source names, downloaded if the cache does not have it.

    Args:
        source: a path, or `hf://OWNER/NAME/FILE`, with `@REVISION` for a branch, tag or commit.
    Raises:
        ValueError: a kind of file that holds no weights; the package is missing; or the Hub does not have the
            file or cannot be reached.
    """
    if not is_remote(source):
        return Path(source)
    match = _SOURCE.fullmatch(str(source))
    if match is None or not match["file"].endswith(_SUFFIXES):
        raise ValueError(
            f"{source}: expected hf://OWNER/NAME/FILE or hf://OWNER/NAME/FILE@REVISION, with a FILE that "
            f"ends in {', '.join(_SUFFIXES)}"
        )
    hub: Any = needed("huggingface_hub", "hub", f"reading {source}")
    try:
        file = hub.hf_hub_download(match["repository"], match["file"], revision=match["revision"])
    # one base class for what the Hub answers, others for what the network does
    except (hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(f"{source}: {_problem(error, hub)}") from error
    return Path(file)


def _problem(error: Exception, hub: Any) -> str:
    """Why there is no file, and what to do."""
    if isinstance(error, hub.errors.LocalEntryNotFoundError):
        return (
            "the Hugging Face Hub cannot be reached, and its cache does not have the file; download it where "
            "there is a network, and copy the folder that HF_HOME names, or give its path to init.pretrained"
        )
    if isinstance(error, hub.errors.GatedRepoError):
        return "its owner asks you to accept terms on the Hugging Face Hub, and to log in by `hf auth login`"
    return f"the Hugging Face Hub does not give this file ({first_line(error)})"
