"""Gradient averaging through any codec: what most algorithms of this package are special cases of."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypedDict, Unpack

import torch

from bagua_kernels.algorithms.exchanges.compressed import CompressedExchange, Feedback
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.gradient_algorithm import GradientAlgorithm, GradientOptions
from bagua_kernels.algorithms.policy.guard import Guard, Guarded
from bagua_kernels.algorithms.policy.only_if_faster import OnlyIfFaster
from bagua_kernels.algorithms.policy.optimizer_fit import holds_back
from bagua_kernels.algorithms.policy.policy import Policy
from bagua_kernels.algorithms.policy.schedule import Assignment, Encoding, Scheduled
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator


class EncodingOptions(TypedDict, total=False):
    """Keyword arguments by which all algorithms with codecs encode gradients."""

    error_feedback: bool | None
    owner_feedback: bool | None
    groups: Mapping[str, Encoding] | None
    exact: str | tuple[str, ...] | list[str]
    min_numel: int
    seed: int
    guard: Guard | None
    only_if_faster: bool


class CodecOptions(EncodingOptions, GradientOptions, total=False):
    """Keyword arguments of all algorithms with codecs."""


class ScaledOptions(CodecOptions, total=False):
    """Those, and the scaler of losses."""

    scaler: torch.amp.GradScaler | None


class CompressionOptions(ScaledOptions, total=False):
    """Keyword arguments of `CompressedAllReduce` beside its codec."""

    warmup_steps: int


# For codecs of few bits, or few elements. They would starve small tensors: the largest elements of a bucket are seldom in a
# bias. Also, a scale costs as much for a short block as for a full one.
LARGE_MATRICES: EncodingOptions = {"exact": "1d", "min_numel": 512}


@register
class CompressedAllReduce(GradientAlgorithm):
    """Synchronous data parallelism with gradients that travel as a codec's payloads.

    For each bucket of gradients, in the order in which backward completes them:

    1. In the first `warmup_steps` steps, average it without compression, as `GradientAllReduce` does.
    2. With error feedback, add what this rank's earlier payloads of it lacked (Karimireddy et al., ICML 2019, algorithm 2).
    3. Average it by the all-reduce that suits the codec (`bagua_kernels.comm.compressed.all_reduce_for`). Dense codecs take
       two passes over the chunks' owners (BAGUA, VLDB 2022, section 3.1), sparse ones an all-gather, and linear ones the
       network's own sum. Owners keep what the encoded mean lacks, too (DoubleSqueeze, Tang et al., ICML 2019).
    4. Keep what was lacking; give everyone the same bits.

    Parameters that are `exact` travel uncompressed behind the payload of their bucket, to the owners of chunks and back.

    Options and their defaults, all by keyword::

        codec='minmax_uint8'     a codec, its spec, or codecs by the step from which on they are used: `{0:
                                 "minmax_uint8", 1000: "minmax_uint4"}`
        error_feedback=None      True if each rank keeps what its payloads lack; by default if the codec is biased
        owner_feedback=None      True if the owners of chunks do; by default as `error_feedback`
        warmup_steps=0           steps without compression at the beginning
        groups=None              other codecs for parameters whose names match a pattern: `{"*.embedding.*": "topk"}`
        exact=()                 patterns of names of parameters to average without compression; "1d" for all biases and
                                 norms
        min_numel=0              parameters with fewer elements are exact too
        seed=0                   of random numbers
        guard=None               measures now and then how much is lost; `stats().errors` has the results
        scaler=None              that by which losses are scaled, if any: residuals change their unit with it
        only_if_faster=False     True to measure in 36 steps if compression is faster than none, by turns of four steps
                                 with it and four without
        bucket_bytes=10485760    gradients are exchanged in buckets of about this size; the first ones may be smaller
        in_flight=None           buckets that are exchanged at a time, each on a thread and connections of its own; by
                                 default 2 on CPUs, 1 on GPUs
        apply_in_backward=False  True to update each bucket's parameters as soon as its mean has arrived, while backward
                                 goes on
        communicator=None        the ranks that train together; those of `comm.init()` if None, which is called if it
                                 has not been
        hierarchical=None        True to average inside nodes in full precision first, and then between them; False for
                                 never; None where nodes have several ranks
        nodes=None               which ranks share a node, such as `[[0, 1], [2, 3]]`; found by the hosts if None
        broadcast_buffers=True   True to begin each forward pass in training mode with rank 0's buffers on all ranks
        average_buffers=False    a pattern of names, as of `fnmatch`, or several
        verify_every=None        steps from one comparison of what all ranks have alike to the next; None for none
        on_failure='raise'       "raise", or "heal": when ranks are lost, those that are left go on without an error

    Attributes:
        sends_gradients: False if payloads have momentum, which no optimizer squares, so that `holds_back` is empty.
    """

    name = "compressed"
    sends_gradients = True

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        codec: Encoding = "minmax_uint8",
        error_feedback: bool | None = None,
        owner_feedback: bool | None = None,
        warmup_steps: int = 0,
        groups: Mapping[str, Encoding] | None = None,
        exact: str | tuple[str, ...] | list[str] = (),
        min_numel: int = 0,
        seed: int = 0,
        guard: Guard | None = None,
        scaler: torch.amp.GradScaler | None = None,
        only_if_faster: bool = False,
        **options: Unpack[GradientOptions],
    ) -> None:
        """Wraps a module; collective over all ranks. All arguments are equal on all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            codec: a codec, its spec, or codecs by the step from which on they are used: `{0: "minmax_uint8", 1000:
                "minmax_uint4"}`. None stands for no compression.
            error_feedback: True if each rank keeps what its payloads lack; by default if the codec is biased.
            owner_feedback: True if the owners of chunks do; by default as `error_feedback`.
            warmup_steps: steps without compression at the beginning.
            groups: other codecs for parameters whose names match a pattern: `{"*.embedding.*": "topk"}`.
            exact: patterns of names of parameters to average without compression; "1d" for all biases and norms.
            min_numel: parameters with fewer elements are exact too.
            seed: of random numbers.
            guard: measures now and then how much is lost; `stats().errors` has the results.
            scaler: that by which losses are scaled, if any: residuals change their unit with it. Read in backward, so
                update it after the optimizer's step.
            only_if_faster: True to measure in 36 steps if compression is faster than none, by turns of four steps with it and
                four without. They begin with the first step that would be compressed. If compression is slower, it is
                switched off for good, which `stats().trial` and checkpoints contain. Results then depend on the time
                measured: ranks stay bit-identical, but runs do not repeat bit for bit.
            **options: as for `GradientAlgorithm`.

        Raises:
            TypeError: a value that should be a codec is not one.
            ValueError: a spec or a number does not fit, or as for `GradientAlgorithm`.
        """
        self.assignment = Assignment.make(codec, warmup_steps, groups, exact, min_numel)
        self.feedback = Feedback(error_feedback, owner_feedback, seed)
        self.guard = guard
        self.scaler = scaler
        # A block never spans two tensors.
        self.alignment = self.assignment.alignment()
        coarse = [codec for codec in self.assignment.codecs if holds_back(codec)]
        self.holds_back = f"payloads of {coarse[0]!r}" if coarse and self.sends_gradients else ""
        self.policy = self._policy()
        if only_if_faster:
            # Outermost: what the guard does not compress is no step of a trial.
            self.policy = self.listener = OnlyIfFaster(self.policy)
        super().__init__(module, optimizer, **options)

    def _policy(self) -> Policy:
        policy: Policy = Scheduled(self.assignment.last_start)
        if self.guard is not None:
            policy = Guarded(policy, self.guard, self.assignment.schedules, self.alignment)
        return policy

    def place(self, name: str, parameter: torch.nn.Parameter) -> tuple[Hashable, bool]:
        """See `GradientAlgorithm.place`."""
        return self.assignment.place(name, parameter)

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`."""
        return CompressedExchange(bucket, communicator, self.policy, self.feedback)
