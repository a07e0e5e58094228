"""This rank's model in training: parameters in buckets, the optimizer, and what others write into them."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from bagua_kernels.algorithms.models.flat_parameters import FlatParameters
from bagua_kernels.algorithms.models.points import Points
from bagua_kernels.algorithms.models.writes import Writes
from bagua_kernels.algorithms.wrapping.frozen import check_frozen
from bagua_kernels.comm import Communicator, Mailbox
from bagua_kernels.errors import CommunicationError, culprits_of, follow_up

_PUT_OFF = 8  # forward passes for which a process waits that wants to join


class Actor(Protocol):
    """What acts at the points of training; see `Loop`."""

    def at_forward(self, training: bool) -> None: ...  # noqa: D102
    def at_uncalled_step(self) -> None: ...  # noqa: D102
    def at_step_begin(self) -> None: ...  # noqa: D102
    def at_step_end(self) -> None: ...  # noqa: D102
    def take_written(self, values: list[torch.Tensor]) -> None: ...  # noqa: D102
    def is_part_of_step(self) -> bool: ...  # noqa: D102
    def leaves_own(self) -> bool: ...  # noqa: D102

    @property
    def unfinished(self) -> int | None: ...  # noqa: D102


class LocalModel:
    """The parameters of one rank between exchanges, and the points of its training at which a `Loop` acts on them.

    What others write into parameters between a step and the backward pass of the next one, such as `load_state_dict`, is taken
    as it is: see `Loop.take_written`. Values that are back by the end of that pass are no write.

    Attributes:
        title: the algorithm's class, for errors.
        name: the algorithm's name, for labels.
        optimizer: whose steps change the parameters.
        scaler: a `GradScaler` that may leave out steps; None without one.
        flat: the parameters in buckets.
        steps: of the optimizer so far, with those that were left out.
        wait_seconds: time that training has waited for communication.
        exchange_seconds: time that a communication thread was busy.
        in_step: True from the first forward pass of training to the end of the step.
        at_point: True in a call by a hook, False in one by the caller's code.
        is_through: True while this rank takes part in what others do without steps of its own, at a call to which all come.
        own: True if parameters may be this rank's own, since a step.
        written: True if parameters were written when the pass under way began.
        loaded: True if parameters have other values since `load_state_dict`, which no step has taken yet.
        writes: finds what others write; None before training begins.
        failure: the error that has ended all exchanges; None while none has.
        opened: communicators that were opened for exchanges, which are closed with the algorithm.
        mend: called with an error of the communication at a point of training. It returns when there is a loop among the ranks
            that are left, and raises where training cannot go on. None to raise in any case.
        ending: True if that was at the end of a step.
        is_wanted: returns True if a process wants to join: `mend` is called then where no exchange is under way.
    """

    def __init__(
        self, title: str, name: str, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
    ) -> None:
        """Begins without parameters; see `open` and `listen`."""
        self.title, self.name, self.optimizer, self.scaler = title, name, optimizer, scaler
        self.flat = FlatParameters({})
        self.steps = 0
        self.wait_seconds = self.exchange_seconds = 0.0
        self.in_step = self.at_point = self.is_through = self.own = self.written = self.loaded = False
        self.writes: Writes | None = None
        self.failure: BaseException | None = None
        self.opened: list[Communicator] = []
        self.mend: Callable[[BaseException], None] | None = None
        self.ending = False
        self.is_wanted: Callable[[], bool] = bool
        self._put_off = 0  # forward passes at which a process had to wait
        self._sent_before = 0  # by mailboxes that were replaced
        self._strays = 0  # passes since the last step before which parameters had changed
        self._warned_of_own = False
        self._frozen: list[tuple[str, torch.nn.Parameter]] = []
        self._communicator: Communicator | None = None
        self._mailbox: Mailbox | None = None
        self._points: Points | None = None
        # Weakly: a loop has this model, and memory of both is to be free when the wrapper is deleted.
        self._found_loop: weakref.ref[Actor] | None = None

    def open(
        self,
        flat: FlatParameters,
        communicator: Communicator,
        mailbox: Mailbox,
        frozen: list[tuple[str, torch.nn.Parameter]],
    ) -> None:
        """Takes parameters in buckets, and what carries their exchanges.

        Args:
            flat: the parameters.
            communicator: of all ranks.
            mailbox: of the same ranks.
            frozen: parameters that are not in `flat`, with their names.
        """
        self.flat, self._communicator, self._mailbox, self._frozen = flat, communicator, mailbox, frozen

    def reopen(self, communicator: Communicator, mailbox: Mailbox) -> None:
        """Goes on among other ranks; what was under way among those before has ended.

        Args:
            communicator: of all ranks.
            mailbox: of the same ranks.
        """
        self.leave("its ranks are others now")
        self._sent_before = self.bytes_sent
        self._communicator, self._mailbox = communicator, mailbox
        self.failure = None
        self.opened = []

    def leave(self, reason: str) -> None:
        """Leaves the mailbox, from any thread."""
        if self._mailbox is not None:
            self._mailbox.leave(reason)

    def follow(self, loop: Actor | None) -> None:
        """Lets another loop, or none, act at the points of training."""
        self._found_loop = None if loop is None else weakref.ref(loop)

    def connect(self, ranks: Sequence[int] | None = None) -> Communicator:
        """Opens a communicator beside that of all ranks, which is closed with the algorithm; collective over all ranks.

        Args:
            ranks: this one and others, as for `Communicator.split`; all if None.
        """
        made = self.communicator.duplicate() if ranks is None else self.communicator.split(ranks)
        assert made is not None
        self.opened.append(made)
        return made

    def listen(self, module: torch.nn.Module, loop: Actor) -> Points:
        """Lets a loop act at the points of training from now on; returns these.

        Args:
            module: that is trained.
            loop: what exchanges its parameters.
        """
        self._found_loop = weakref.ref(loop)
        if self.writes is None:
            self.writes = Writes(self.flat)
        self._points = Points(module, self.optimizer, self, self.scaler)
        return self._points

    def stop_listening(self) -> None:
        """Ends what `listen` began; calling it again does nothing."""
        if self._points is not None:
            self._points.close()

    @property
    def _loop(self) -> Actor | None:
        return None if self._found_loop is None else self._found_loop()

    @property
    def communicator(self) -> Communicator:
        """Of all ranks."""
        assert self._communicator is not None
        return self._communicator

    @property
    def mailbox(self) -> Mailbox:
        """What carries the exchanges."""
        assert self._mailbox is not None
        return self._mailbox

    @property
    def bytes_sent(self) -> int:
        """Bytes that the mailbox has put on the wire."""
        return self._sent_before + (0 if self._mailbox is None else self._mailbox.bytes_sent)

    def on_forward(self, training: bool) -> None:
        """See `Listener.on_forward`; calls `Loop.at_forward` where parameters may be exchanged."""
        assert self._loop is not None
        assert self.writes is not None
        if not training:
            if not self._is_for_evaluation():
                self._at("at_forward", training)
            return
        if not self.in_step:
            written = self.has_written()
            if written and self.is_part_of_step():
                self.writes.mark()
                written = False
            self.loaded = self.loaded and written
            self.in_step, self.written, self._strays = True, written, 0
        else:
            self.flat.check(quickly=True)
            if self.writes.changed():
                self._look_for_strays()
        # Parameters that were written may be put back before the step. Nothing changes them until then.
        if not self.written:
            with self._called():
                self._at("at_forward", training)

    def on_step_begin(self) -> None:
        """See `Listener.on_step_begin`; calls `Loop.at_step_begin`."""
        assert self._loop is not None
        assert self.writes is not None
        with self._called():
            if not self.in_step:
                # A loop that calls parts of the module, or skips a step.
                self.in_step, self.written = True, self.has_written() and not self.is_part_of_step()
                self._loop.at_uncalled_step()
            if self.written:
                self.accept_written()
            self._at("at_step_begin")
        self.writes.begin_step()

    def on_step_end(self) -> None:
        """See `Listener.on_step_end`; calls `Loop.at_step_end`."""
        assert self._loop is not None
        assert self.writes is not None
        # Where a parameter has new memory, the step has changed that.
        self.flat.check(quickly=True)
        with self._called():
            self._at("at_step_end")
        self.in_step = self.written = self.loaded = False
        self.own = True
        self.writes.mark()

    def on_state_dict(self) -> None:
        """See `Listener.on_state_dict`; warns once if parameters are this rank's own."""
        assert self._loop is not None
        if self.communicator.size > 1 and self.own and self._loop.leaves_own() and not self._warned_of_own:
            self._warned_of_own = True
            warnings.warn(
                f"this state_dict() has rank {self.communicator.rank}'s own parameters, which differ between ranks since the "
                f"last exchange of {self.title}: call synchronize() on all ranks before, or make it within averaged(). "
                "To resume, each rank saves its own, and its algorithm_state_dict()",
                RuntimeWarning,
                stacklevel=5,
            )

    def on_load(self) -> None:
        """See `Listener.on_load`; what was loaded is no part of a step, however little it differs from what was there."""
        assert self.writes is not None
        # The values of before may have been put back.
        self.loaded = self.flat.is_moved or self.writes.found()

    def is_part_of_step(self) -> bool:
        """Returns True if what was written after a step counts as a part of it."""
        assert self._loop is not None
        return not self.loaded and self._loop.is_part_of_step()

    def _at(self, point: str, *arguments: bool) -> None:
        """Calls the loop at a point of training; where ranks are lost, that of those which are left."""
        while True:
            if (loop := self._loop) is None:  # one rank is left
                return
            try:
                if point == "at_forward":
                    self._let_in(loop)
                getattr(loop, point)(*arguments)
                return
            except CommunicationError as error:
                if self.mend is None:
                    raise
                self.ending = point == "at_step_end"
                try:
                    self.mend(error)
                finally:
                    self.ending = False
            if point == "at_step_end":
                # The steps of all ranks are counted alike by now.
                return

    def _let_in(self, loop: Actor) -> None:
        """Lets a process join that wants to, once no exchange is under way, or after some forward passes.

        Raises:
            CommunicationError: so that it may.
        """
        if not self.is_wanted():
            return
        if loop.unfinished is None or self._put_off >= _PUT_OFF:
            self._put_off = 0
            raise CommunicationError("a process joins")
        self._put_off += 1

    def _is_for_evaluation(self) -> bool:
        """Returns True if parameters were written, or moved, and may be put back after an evaluation: nothing may change them."""
        assert self.writes is not None
        return self.written if self.in_step else self.flat.is_moved or self.writes.found()

    @contextlib.contextmanager
    def _called(self) -> Iterator[None]:
        self.at_point = True
        try:
            yield
        finally:
            self.at_point = False

    def _look_for_strays(self) -> None:
        """Raises if parameters change from pass to pass, and not by steps of the given optimizer."""
        self._strays += 1
        if self._strays > 1:
            raise RuntimeError(
                f"parameters change between backward passes without a step of the {type(self.optimizer).__name__} that was "
                f"given to {self.title}, so that nothing is exchanged: give it the optimizer that takes the steps, and "
                "call its step()"
            )

    def check_frozen(self) -> None:
        """Raises if a parameter is trained that was frozen when the module was wrapped."""
        check_frozen(self._frozen)

    def has_written(self) -> bool:
        """Returns True if others have written parameters since the last step or exchange."""
        assert self.writes is not None
        self.flat.check(quickly=True)
        return self.writes.found()

    def has_to_keep(self) -> bool:
        """Returns True if parameters have values from outside that no step has taken yet."""
        if self.writes is None:
            return False
        assert self._loop is not None
        # A pass whose step was left out may have begun meanwhile.
        if self.in_step:
            return self.written and self.has_written()
        return self.has_written() and not self.is_part_of_step()

    def accept_written(self, called: bool = False) -> None:
        """Lets what is kept beside parameters follow what was written, unless it was put back, or is part of the step.

        Args:
            called: True to do that as in a call by a hook.
        """
        assert self._loop is not None
        assert self.writes is not None
        with self._called() if called else contextlib.nullcontext():
            self.written = self.loaded = False
            if self.has_written():
                with self.failing(), torch.no_grad():
                    self._loop.take_written(self.flat.copies())
            self.writes.mark()

    def put(self, values: list[torch.Tensor]) -> None:
        """Writes a vector into each bucket."""
        for bucket, each in zip(self.flat.buckets, values, strict=True):
            bucket.flat.copy_(each)

    def mark(self) -> None:
        """To be called when an exchange has written parameters.

        In the middle of a step, where the caller wanted it, autograd is informed. A backward pass then raises whose forward pass
        had other parameters.
        """
        self.loaded = False
        if self.writes is not None:
            self.writes.mark()
            if self.in_step and not self.at_point:
                torch.autograd.graph.increment_version(list(self.flat.parameters.values()))

    def fail(self, error: BaseException) -> None:
        """Ends all exchanges: other ranks that wait for this one raise."""
        self.failure = error
        self.mailbox.leave(f"an exchange failed: {error}", culprits_of(error))

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Ends all exchanges if the block raises."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def check_failure(self) -> None:
        """Raises if an exchange has failed.

        Raises:
            CommunicationError: or whatever it was.
        """
        if self.failure is not None:
            text = f"this {self.title} cannot go on since an exchange failed: {self.failure}"
            raise follow_up(self.failure, text) from self.failure

    def close(self) -> None:
        """Calls the loop no more, and leaves the mailbox."""
        self.stop_listening()
        self.leave(f"{self.title} was closed")
