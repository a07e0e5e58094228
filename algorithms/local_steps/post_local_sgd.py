"""Local steps after a first phase without: post-local SGD."""

from __future__ import annotations

from types import MappingProxyType
from typing import Unpack

import torch

from bagua_kernels.algorithms.local_steps.local_sgd import LocalSGD
from bagua_kernels.algorithms.local_steps.outer_loop import OuterOptions
from bagua_kernels.algorithms.registry import register


@register
class PostLocalSGD(LocalSGD):
    """Averages parameters after each step at first, and then once in `interval` steps (Lin et al., ICLR 2020).

    1. In the first `first_phase` steps, take the mean of the parameters after each.
    2. Then do as `LocalSGD` does. Ranks explore by themselves when the loss has come down.

    Options and their defaults, all by keyword::

        first_phase=1000       the number of steps after each of which parameters are averaged
        interval=16            optimizer's steps from one round to the next, afterwards
        codec=None             of pseudo-gradients: a codec, its spec, or codecs by the round from which on they are
                               used
        error_feedback=None    True if each rank keeps what its payloads lack; by default if the codec is biased
        owner_feedback=None    True if the owners of chunks do; by default as `error_feedback`
        exact='1d'             patterns of names of parameters that no codec encodes; "1d" for all biases and norms
        min_numel=512          parameters with fewer elements are exact too
        seed=0                 of random numbers
        delay=0                optimizer's steps, less than `interval`, that an exchange may take beside training
        blend=None             from 0 to 1: the share of a rank's own parameters when a result is used
        sync_state=None        how often the optimizer's first and second moments are averaged (DES-LOC, Iacob et al.,
                               2025)
        penalty=None           a `Penalty` for pseudo-gradients with large norms; None for none
        by_speed=False         True if ranks take steps in proportion to their speeds, of which `interval` is the mean
                               then
        quorum=None            ranks whose pseudo-gradients are enough for an outer step; None for all
        grace=0.0              seconds for which a quorum waits for further ranks
        communicator=None      the ranks that train together; those of `comm.init()` if None, which is called if it has
                               not been
        hierarchical=None      True to average inside nodes in full precision first, and then between them; False for
                               never; None where nodes have several ranks
        nodes=None             which ranks share a node, such as `[[0, 1], [2, 3]]`; found by the hosts if None
        bucket_bytes=10485760  parameters are exchanged in buckets of about this size
        average_states=False   True if `synchronize` averages the optimizer's states, too
        verify_every=None      steps from one comparison of what all ranks have alike to the next; None for none, at the
                               first round after so many steps
        on_failure='raise'     "raise", or "heal": when ranks are lost, those that are left go on without an error
    """

    name = "post_local_sgd"
    # Of PyTorch's averager and hook.
    synonyms = MappingProxyType(
        {"period": "interval", "warmup_steps": "first_phase", "start_localSGD_iter": "first_phase"}
    )

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        first_phase: int = 1000,
        interval: int = 16,
        **options: Unpack[OuterOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `OuterLoop`.
            optimizer: as for `OuterLoop`.
            first_phase: the number of steps after each of which parameters are averaged.
            interval: as for `OuterLoop`, afterwards.
            **options: as for `OuterLoop`.

        Raises:
            TypeError: as for `OuterLoop`.
            ValueError: `first_phase` is negative, or as for `OuterLoop`.
        """
        if first_phase < 0:
            raise ValueError(f"first_phase must be 0 or more, got {first_phase=}")
        if first_phase and options.get("by_speed"):
            raise ValueError("by_speed is for rounds of many steps: use LocalSGD instead, or first_phase=0")
        self.first_phase = first_phase
        super().__init__(module, optimizer, interval=interval, **options)
