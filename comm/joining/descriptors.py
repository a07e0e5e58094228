"""File descriptors of this process: how many it may have, and whether that will do for all ranks."""

from __future__ import annotations

import os
import resource

from bagua_kernels.errors import CommunicationError

LIMIT = "`ulimit -n`"
_SPARE = 64  # for files, pipes and libraries that are opened later
_OWN = "/proc/self/fd"


def make_room(needed: int, ranks: int, useful: int = 0) -> None:
    """Raises the soft limit on open files to the hard one, if it is too low.

    Args:
        needed: descriptors that will be opened beside those that are open.
        ranks: of the job; for the error.
        useful: further descriptors that may be wanted later, for which the limit is raised as far as possible.

    Raises:
        CommunicationError: if the hard limit is too low for those that are needed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = _open() + needed + _SPARE
    if soft == resource.RLIM_INFINITY or least + useful <= soft:
        return
    most = soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        most = hard
    except (OSError, ValueError):  # a container may forbid it
        pass
    if most != resource.RLIM_INFINITY and least > most:
        raise CommunicationError(
            f"this process needs {least} file descriptors among {ranks} ranks, and may have {most}: raise the hard limit of "
            f"{LIMIT} to {least} or more (in /etc/security/limits.conf, or LimitNOFILE= of a service), or start fewer ranks"
        )


def _open() -> int:
    """Returns how many are open; a guess where that cannot be seen."""
    return len(os.listdir(_OWN)) if os.path.isdir(_OWN) else _SPARE
