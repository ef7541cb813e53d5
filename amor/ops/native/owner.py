"""Whose a file or folder is: code is loaded only from where nobody but the user can have put it."""

import os
import stat
from pathlib import Path

ROOT, UNKNOWN = (
    0,
    65534,
)  # users; the second is shown in a container for those it does not know, the real root among them


def others_may_write(path: Path) -> str:
    """How somebody else could have put something into a file or folder, and what to do about it; nothing: they could not.

    It must be the user's and closed to group and others. A folder above it must be the user's or root's, and closed to others
    unless it is sticky, as /tmp is: there nobody moves what is another's.
    """
    path = path.resolve()
    if not hasattr(os, "geteuid"):  # Windows: other laws
        return ""
    me = os.geteuid()
    for each in (path, *path.parents):
        found = each.stat()
        if found.st_uid not in ((me,) if each == path else (me, ROOT, UNKNOWN)):
            return f"{each} belongs to user {found.st_uid}, not to you ({me}): chown it"
        if each == path and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others can write to {each}: chmod go-w {each}"
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            return f"others can write to {each}: chmod o-w {each}"
    return ""
