"""JSON files that somebody else wrote: an object of bounded size and depth in valid text, or one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vit2linear.errors import Vit2LinearError
from vit2linear.strict import malformed

LARGEST = 64 * 2**20
"""Bytes; the longest descriptions name tens of thousands of classes in two of them a thousand times over."""


def read_object(path: Path, what: str, error: type[Vit2LinearError]) -> dict[str, Any]:
    """The object in a JSON file, with or without a byte order mark.

    Args:
        path: the file.
        what: its name for messages, such as ``config.json of 'google/vit-base'``.
        error: what is raised.

    Raises:
        Vit2LinearError: of the kind ``error``; not a regular file, unreadable, too large, or not such an object.
    """
    again = "Download it again, or mend it by hand."
    try:
        if not path.is_file():
            raise error(f"{what} is missing, or not a regular file.", again)
        if path.stat().st_size > LARGEST:
            raise error(f"{what} is larger than {LARGEST >> 20} MiB, so it describes no model.", again)
        value = json.loads(path.read_text("utf-8-sig"))
    except OSError as found:
        raise error(f"{what} cannot be read: {found.strerror or found}.", "Check its permissions.") from found
    except ValueError as found:
        raise error(f"{what} is not JSON: {found}.", again) from found
    except RecursionError:
        raise error(f"{what} is nested without end.", again) from None
    if not isinstance(value, dict):
        raise error(f"{what} is not a JSON object, but a {type(value).__name__}.", again)
    if (problem := malformed(value)) is not None:
        raise error(f"{what} holds {problem}.", again)
    return value
