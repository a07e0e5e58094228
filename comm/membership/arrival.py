"""How a process joins a job that runs."""

from __future__ import annotations

from collections.abc import Sequence

from bagua_kernels.comm.joining.gate import listen
from bagua_kernels.comm.joining.installed import Installed
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.membership.agreement import Census, Quota
from bagua_kernels.comm.membership.door import ask_in_turn, knock, receive, send
from bagua_kernels.comm.membership.draft import Drafting, fetch
from bagua_kernels.comm.membership.membership import Membership, connected
from bagua_kernels.comm.membership.transports import EpochTransport, LineTransport
from bagua_kernels.errors import MismatchError


def arrive(
    doors: Sequence[tuple[str, int]],
    secret: Secret,
    seconds: float,
    draft: Drafting | None = None,
    transport: EpochTransport | None = None,
) -> Membership:
    """Returns the membership of a job that this process has joined, in an epoch that begins with it.

    1. Fetch a draft of the model, if one is given, while the members train on.
    2. Ask one of the members, whichever answers first.
    3. The members come to the end of their epoch, agree on the next one, and send who they are.
    4. Connect with all of them.

    Args:
        doors: where members listen, `Membership.address` of each.
        secret: of the job.
        seconds: for all of it but the draft.
        draft: see `fetch`; None for none.
        transport: as for the constructor of `Membership`, of the kind that the members have.

    Raises:
        CommunicationError: nobody answered in time, or the members did not connect.
        MismatchError: the job has another version of this package, or tensors on another type of device.
    """
    if draft is not None:
        fetch(doors, secret, seconds, draft)
    made = transport or LineTransport()
    return ask_in_turn(
        doors,
        seconds,
        lambda door, left: _arrive(door, secret, left, draft, made),
        "no member let this process join",
    )


def _arrive(
    door: tuple[str, int], secret: Secret, left: float, draft: Drafting | None, transport: EpochTransport
) -> Membership:
    sock, host = knock(door, secret, left)
    with sock, listen(host, 256) as listener:
        sock.settimeout(left)
        request = {"address": listener.getsockname()[:2], "installed": Installed.here().told()}
        send(sock, {**request, "tensors": transport.tensors})
        told = receive(sock)
        if "refused" in told:
            raise MismatchError(told["refused"])
        census, name, timeout = Census.from_json(told["census"]), told["name"], told["timeout"]
        anchor = connected(name, census, listener, secret, timeout)
    terms = Quota(**told["terms"])
    return Membership.joined(anchor, name, census, told["next_name"], terms, secret, draft, transport)
