"""Who owns a file or folder: code is loaded only from where nobody but the user can write."""

import os
import stat
from pathlib import Path

# users; a container shows the second for those it has no name for, the real root among them
ROOT, UNKNOWN = 0, 65534


def others_may_write(path: Path) -> str:
    """How somebody else could have written to a file or folder, and the remedy; "": nobody could.

    It must be the user's and closed to group and others. A folder above it must be the user's or
    root's, and closed to others unless it is sticky, as /tmp is: there nobody can move the files of
    another.
    """
    path = path.resolve()
    if not hasattr(os, "geteuid"):  # Windows has other permissions
        return ""
    me = os.geteuid()
    for each in (path, *path.parents):
        status = each.stat()
        if status.st_uid not in ((me,) if each == path else (me, ROOT, UNKNOWN)):
            return f"{each} belongs to user {status.st_uid}, not to you ({me}): chown it"
        if each == path and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others can write to {each}: chmod go-w {each}"
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return f"others can write to {each}: chmod o-w {each}"
    return ""
