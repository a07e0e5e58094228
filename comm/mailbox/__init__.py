"""Messages between single ranks, and what one thread per rank makes of them: averages that any rank can start."""

from bagua_kernels.comm.mailbox.mailbox import (
    LONGEST_LETTER,
    Mailbox,
    late_error,
    left_reason,
    lost_error,
)

__all__ = ["LONGEST_LETTER", "Mailbox", "late_error", "left_reason", "lost_error"]
