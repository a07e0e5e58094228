"""Local steps of Muon, with Nesterov's momentum on pseudo-gradients: MuLoCo."""

from __future__ import annotations

from typing import Unpack

import torch

from bagua_kernels.algorithms.local_steps.diloco import DiLoCo
from bagua_kernels.algorithms.local_steps.outer_loop import DenseOptions
from bagua_kernels.algorithms.local_steps.outer_rule import Number
from bagua_kernels.algorithms.policy.schedule import Encoding
from bagua_kernels.algorithms.registry import register


@register
class MuLoCo(DiLoCo):
    """DiLoCo around Muon, whose pseudo-gradients bear low precision better (MuLoCo, Thérien et al., 2025, algorithm 1).

    1. Take `interval` steps of the optimizer: Muon for hidden matrices, AdamW for the rest.
    2. d = mean(start - x) over all ranks, in 4 bits.
    3. m = outer_momentum m + d; start -= outer_lr (d + outer_momentum m).
    4. x = start, at once or after `delay` steps, see `OuterLoop`.

    The paper finds half to a third of the loss that local steps of AdamW cost. `bagua_kernels.optim.muon_with_adamw` makes the
    optimizer.

    Options and their defaults, all by keyword::

        interval=30            optimizer's steps from one exchange of a parameter to its next
        outer_lr='auto'        of step 3
        outer_momentum='auto'  of step 3; "auto" for one that follows the rounds
        fragments=1            a divisor of `interval`; `delay` is less than `interval` / `fragments`
        codec='absmax_int4'    of pseudo-gradients: a codec, its spec, or codecs by the round from which on they are
                               used
        error_feedback=False   True if each rank keeps what its payloads lack; by default if the codec is biased
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

    name = "mu_loco"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        interval: int = 30,
        outer_lr: Number = "auto",
        outer_momentum: Number = "auto",
        fragments: int = 1,
        codec: Encoding = "absmax_int4",
        error_feedback: bool | None = False,
        **options: Unpack[DenseOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `OuterLoop`.
            optimizer: a Muon, or a `ChainedOptimizer` that has one.
            interval: as for `DiLoCo`.
            outer_lr: of step 3.
            outer_momentum: of step 3; "auto" for one that follows the rounds. The paper has 0.6 for one rank, and 0.8 to 0.9
                for 8 to 16.
            fragments: as for `DiLoCo`.
            codec: as for `OuterLoop`.
            error_feedback: as for `OuterLoop`. Four bits need none, two do (section 5 of the paper).
            **options: as for `OuterLoop`.

        Raises:
            TypeError: the optimizer has no Muon, or as for `OuterLoop`.
            ValueError: as for `DiLoCo`.
        """
        muon = getattr(torch.optim, "Muon", ())  # PyTorch 2.9
        if not any(isinstance(each, muon) for each in getattr(optimizer, "optimizers", [optimizer])):
            raise TypeError(
                f"expected an optimizer with Muon, got {optimizer!r}: make one by bagua_kernels.optim.muon_with_adamw(module), "
                "or use DiLoCo"
            )
        super().__init__(
            module,
            optimizer,
            interval=interval,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            fragments=fragments,
            codec=codec,
            error_feedback=error_feedback,
            **options,
        )
